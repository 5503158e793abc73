"""From logits to the next token of each sequence.

Order: bias, penalties, tokens that are ruled out, the form of structured output (logit_adjustment.py),
temperature, then min_p, top_k and top_p (token_filter.py), then the draw. vLLM rules tokens out first; the
result is the same, since neither a bias nor a penalty brings back what is -inf. The draw takes one uniform
number per (seed, position) and inverts the cumulative distribution in the order of token ids: of all orders
the one in which rounding of the logits can least change the outcome, since it never moves a token past
another.

What is asked of a row is the same `LogitAdjustment` and `Draw` whoever computes it: torch, here, on any
device, or the C++ of kernels/cpu/sampling.cpp. That one rounds its exponentials and sums in other ways, so it
may take a neighbour where a number falls on the border between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine_service.logit_adjustment import adjust, adjustment_of
from engine_service.randomness import uniforms
from engine_service.sequence import Sequence
from engine_service.token_filter import allowed_tokens
from kernels.cpu.sampling import NativeSampling
from kernels.sampling_metadata import Draw, LogitAdjustment

_CHUNK = 512  # tokens summed at once in the first pass of the inverse


class Sampler:
    """Chooses tokens. Holds no state between steps: everything is in the sequences."""

    def __init__(self, eos_token_ids: Iterable[int], native: NativeSampling | None = None) -> None:
        """native: what computes on the CPU, if there is a compiler for it."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._native = native

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
        """Next token of each row. logits: float32 `[len(sequences), vocab]` with contiguous rows.

        Rows of sequences for which `may_adjust` is true are changed in place, and no others.
        """
        adjustments = [adjustment_of(sequence, self._eos_token_ids) for sequence in sequences]
        draws = _draws_of(sequences)
        if self._native is not None:
            return self._native.sample(logits, adjustments, draws)
        return sample_with_torch(logits, adjustments, draws)


def _draws_of(sequences: SequenceOf[Sequence]) -> list[Draw | None]:
    """None: the largest logit."""
    draws: list[Draw | None] = [None] * len(sequences)
    rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
    if rows:
        params = [sequences[row].sampling for row in rows]
        # A token's position is the number of tokens before it, wherever those were generated.
        numbers = uniforms([p.seed for p in params], [sequences[row].num_tokens for row in rows])
        for row, p, number in zip(rows, params, numbers.tolist(), strict=True):
            draws[row] = Draw(number, p.temperature, p.min_p, p.top_k, p.top_p)
    return draws


def sample_with_torch(
    logits: Tensor, adjustments: SequenceOf[LogitAdjustment | None], draws: SequenceOf[Draw | None]
) -> list[int]:
    """As `NativeSampling.sample`, which is tested against it."""
    for row, adjustment in enumerate(adjustments):
        if adjustment is not None:
            adjust(logits[row], adjustment)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    asked = {row: draw for row, draw in enumerate(draws) if draw is not None}
    if asked:
        drawn = _draw(logits[list(asked)], list(asked.values()))
        for row, token in zip(asked, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Changes the logits."""
    numbers = torch.tensor([draw.number for draw in draws], dtype=torch.float64, device=logits.device)
    return _invert(weigh(logits, draws), numbers).tolist()


def weigh(logits: Tensor, draws: SequenceOf[Draw]) -> Tensor:
    """Unnormalised probabilities of all tokens, float32 `[len(draws), vocab]`: 0 of those that must not come.

    The largest of a row is 1, unless none has any. Changes the logits.
    """
    # A model may overflow (float16) and a mask may leave nothing: neither must end the other rows' step.
    largest = torch.finfo(logits.dtype).max / 2
    chosen = logits.nan_to_num_(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    # Shifted before dividing, so that a tiny temperature gives -inf and never inf - inf.
    chosen -= chosen.amax(dim=-1, keepdim=True).clamp_(min=-largest)
    chosen /= torch.tensor([draw.temperature for draw in draws], device=chosen.device).unsqueeze(-1)
    weights = chosen.exp_()
    for index, draw in enumerate(draws):
        if (allowed := allowed_tokens(weights[index], draw)) is not None:
            kept = weights[index][allowed]
            weights[index].zero_()
            weights[index][allowed] = kept
    return weights


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row the first token whose cumulative share exceeds the row's number; 0 if none has weight.

    weights: float32 `[rows, vocab]`, finite; numbers: float64 `[rows]` in
    [0, 1). Two passes, over sums of chunks and inside one chunk, as a cumulative sum in float64
    over a whole vocabulary costs several times a plain sum.
    """
    num_rows, vocab_size = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab_size % _CHUNK)).view(num_rows, -1, _CHUNK)
    chunk_ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)  # [rows, num_chunks]
    totals = chunk_ends[:, -1]
    # Below the total also when the product is rounded up, so that a chunk with weight is always found.
    targets = torch.minimum(numbers * totals, totals.nextafter(torch.zeros_like(totals))).unsqueeze(-1)
    chunk = torch.searchsorted(chunk_ends, targets, right=True).clamp_(max=chunk_ends.shape[1] - 1)
    before = torch.where(chunk > 0, chunk_ends.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, chunk.unsqueeze(-1).expand(-1, -1, _CHUNK)).squeeze(1)  # [rows, _CHUNK]
    ends = before + inside.double().cumsum(-1)
    offset = torch.searchsorted(ends, targets, right=True)
    # The two sums round differently, so a target may pass the end here: the last token with weight is meant.
    positions = torch.arange(_CHUNK, device=weights.device)
    last = torch.where(inside > 0, positions, -1).amax(-1, keepdim=True)
    found = (chunk * _CHUNK + torch.minimum(offset, last)).squeeze(-1)
    return torch.where(totals > 0, found, 0)
