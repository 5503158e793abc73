"""Log-probabilities for the rows that ask for them, of what the model said before anybody changed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_service.logit_adjustment import may_adjust
from engine_service.sequence import Sequence
from kernels.cpu.sampling import NativeSampling
from kernels.sampling_metadata import RowLogprobs
from shared.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinities, and a model may overflow; vLLM writes this one


class RawLogprobs:
    """The model's own distribution of one step, kept while the sampler works on the logits.

    Costs nothing when no row asks. Does not depend on the other rows, nor on sampling parameters.
    """

    def __init__(
        self, logits: Tensor, sequences: SequenceOf[Sequence], native: NativeSampling | None = None
    ) -> None:
        """logits: float32 `[len(sequences), vocab]`; kept, of rows that the sampler may change a copy."""
        self._native = native
        self._num_rows = len(sequences)
        self._wanted = {  # row: number of alternatives
            row: sequence.sampling.logprobs
            for row, sequence in enumerate(sequences)
            if sequence.sampling.logprobs is not None
        }
        self._kept = [
            logits[row].clone() if may_adjust(sequences[row]) else logits[row] for row in self._wanted
        ]

    def of(self, token_ids: SequenceOf[int]) -> list[TokenLogprobs | None]:
        """What to tell of the chosen token of each row; None for rows that did not ask."""
        told: list[TokenLogprobs | None] = [None] * self._num_rows
        if self._wanted:
            chosen = [token_ids[row] for row in self._wanted]
            found = logprobs_of(self._kept, chosen, list(self._wanted.values()), self._native)
            for row, result in zip(self._wanted, found, strict=True):
                told[row] = result
        return told


def logprobs_of(
    rows: SequenceOf[Tensor],
    token_ids: SequenceOf[int],
    nums_top: SequenceOf[int],
    native: NativeSampling | None = None,
) -> Iterator[TokenLogprobs]:
    """What to tell of one token for each row of logits, float32 `[vocab]`, with so many of the best.

    There is at least one row.
    """
    num_top = min(max(nums_top), rows[0].shape[0])
    if native is not None:
        found = native.look_up(rows, token_ids, num_top)
    elif rows[0].device.type == "cpu":
        found = look_up_on_cpu([row.numpy() for row in rows], token_ids, num_top)
    else:
        found = look_up_on_device(torch.stack(list(rows)), token_ids, num_top)
    for token_id, num_wanted, result in zip(token_ids, nums_top, found, strict=True):
        pairs = zip(result.top_ids[:num_wanted], map(_finite, result.top), strict=False)
        yield TokenLogprobs(token_id, _finite(result.chosen), result.rank, list(pairs))


def look_up_on_cpu(
    rows: Iterable[NDArray[np.float32]], chosen: Iterable[int], num_top: int
) -> Iterator[RowLogprobs]:
    """Of one token for each row of logits `[vocab]`: where there are no C++ kernels, and to test them."""
    # With numpy for the reason that is told in structured_output/logit_mask.py: loops this small are
    # slower on several threads.
    for row, token_id in zip(rows, chosen, strict=True):
        with np.errstate(invalid="ignore"):  # of a model that has overflowed
            largest = row.max()
            normaliser = float(largest) + float(np.log(np.exp(row - largest).sum(dtype=np.float64)))
        top = _best(np.where(np.isnan(row), -np.inf, row), num_top)
        yield RowLogprobs(
            float(row[token_id]) - normaliser,
            int(np.count_nonzero(row > row[token_id])) + 1,
            top.tolist(),
            (row[top].astype(np.float64) - normaliser).tolist(),
        )


def _best(row: NDArray[np.float32], number: int) -> NDArray[np.int64]:
    """In descending order; of equals, those with the lower ids come first."""
    if number == 0:
        return np.empty(0, dtype=np.int64)
    ids = np.flatnonzero(row >= np.partition(row, -number)[-number])
    return ids[np.lexsort((ids, -row[ids]))][:number]


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
