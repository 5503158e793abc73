"""Log-probabilities for the rows that ask for them, of what the model said before anybody changed it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_service.sequence import Sequence
from shared.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinities, and a model may overflow; vLLM writes this one


class RowLogprobs(NamedTuple):
    chosen: float
    rank: int  # from 1; equals share the better one, so that a greedy choice is always the first
    top_ids: list[int]
    top: list[float]  # descending


class RawLogprobs:
    """The model's own distribution of one step, kept while the sampler works on the logits.

    Costs nothing when no row asks. Does not depend on the other rows, nor on sampling parameters.
    """

    def __init__(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> None:
        """logits: float32 `[len(sequences), vocab]`; the rows that are needed are copied."""
        self._num_rows = len(sequences)
        self._wanted = {  # row: number of alternatives
            row: sequence.sampling.logprobs
            for row, sequence in enumerate(sequences)
            if sequence.sampling.logprobs is not None
        }
        self._kept: Tensor | NDArray[np.float32] | None = None
        if self._wanted:
            rows = list(self._wanted)
            self._kept = logits.numpy()[rows] if logits.device.type == "cpu" else logits[rows]

    def of(self, token_ids: SequenceOf[int]) -> list[TokenLogprobs | None]:
        """What to tell of the chosen token of each row; None for rows that did not ask."""
        told: list[TokenLogprobs | None] = [None] * self._num_rows
        if self._kept is not None:
            chosen = [token_ids[row] for row in self._wanted]
            found = _tell(self._kept, chosen, list(self._wanted.values()))
            for row, result in zip(self._wanted, found, strict=True):
                told[row] = result
        return told


def logprobs_of(
    logits: Tensor, token_ids: SequenceOf[int], nums_top: SequenceOf[int]
) -> Iterator[TokenLogprobs]:
    """What to tell of one token for each row of logits, float32 `[rows, vocab]`, with so many of the best."""
    return _tell(logits.numpy() if logits.device.type == "cpu" else logits, token_ids, nums_top)


def _tell(
    logits: Tensor | NDArray[np.float32], token_ids: SequenceOf[int], nums_top: SequenceOf[int]
) -> Iterator[TokenLogprobs]:
    num_top = min(max(nums_top), logits.shape[-1])
    if isinstance(logits, np.ndarray):
        found = look_up_on_cpu(logits, token_ids, num_top)
    else:
        found = look_up_on_device(logits, token_ids, num_top)
    for token_id, num_wanted, result in zip(token_ids, nums_top, found, strict=True):
        pairs = zip(result.top_ids[:num_wanted], map(_finite, result.top), strict=False)
        yield TokenLogprobs(token_id, _finite(result.chosen), result.rank, list(pairs))


def look_up_on_cpu(
    logits: NDArray[np.float32], chosen: SequenceOf[int], num_top: int
) -> Iterator[RowLogprobs]:
    """logits: `[rows, vocab]`; a chosen token for each row."""
    # With numpy for the reason that is told in structured_output/logit_mask.py: loops this small are
    # slower on several threads.
    for row, token_id in zip(logits, chosen, strict=True):
        with np.errstate(invalid="ignore"):  # of a model that has overflowed
            largest = row.max()
            normaliser = float(largest) + float(np.log(np.exp(row - largest).sum(dtype=np.float64)))
        top = np.argpartition(row, -num_top)[-num_top:] if num_top else np.empty(0, dtype=np.int64)
        top = top[np.lexsort((top, -row[top]))]
        yield RowLogprobs(
            float(row[token_id]) - normaliser,
            int(np.count_nonzero(row > row[token_id])) + 1,
            top.tolist(),
            (row[top].astype(np.float64) - normaliser).tolist(),
        )


def look_up_on_device(logits: Tensor, chosen: SequenceOf[int], num_top: int) -> Iterator[RowLogprobs]:
    """The same for a tensor, all rows at once."""
    logprobs = logits.log_softmax(-1)
    chosen_ids = logprobs.new_tensor(chosen).long().unsqueeze(-1)
    of_chosen = logprobs.gather(-1, chosen_ids)
    ranks = (logprobs > of_chosen).sum(-1) + 1
    top, top_ids = logprobs.topk(num_top)
    columns = zip(of_chosen.squeeze(-1).tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return map(RowLogprobs._make, columns)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also what is not a number
