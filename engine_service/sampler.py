"""From logits to the next token of each sequence.

Order: bias, penalties, tokens that are ruled out, the form of structured output, temperature, then
min_p, top_k and top_p, then the draw. vLLM rules tokens out first; the result is the same, since neither a
bias nor a penalty brings back what is -inf. The draw takes one uniform number per (seed, position) and
inverts the cumulative distribution in the order of token ids: of all orders the one in which rounding
of the logits can least change the outcome, since it never moves a token past another.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine_service.barred_tokens import barred_tokens, left_of_allowed
from engine_service.randomness import uniforms
from engine_service.sequence import Sequence
from engine_service.structured_output.logit_mask import keep_only
from engine_service.structured_output.token_mask import token_mask
from engine_service.token_filter import allowed_tokens

_CHUNK = 512  # tokens summed at once in the first pass of the inverse


class Sampler:
    """Chooses tokens. Holds no state between steps: everything is in the sequences."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
        """Next token of each row. logits: float32 `[len(sequences), vocab]`, changed in place."""
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        random_rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
        if random_rows:
            drawn = _draw(logits, random_rows, sequences)
            for row, token in zip(random_rows, drawn, strict=True):
                tokens[row] = token
        return tokens

    def _adjust(self, row: Tensor, sequence: Sequence) -> None:
        """All before the temperature: on one row `[vocab]`, in place; free for rows that use none."""
        params = sequence.sampling
        if params.logit_bias:
            row[list(params.logit_bias)] += torch.tensor(
                list(params.logit_bias.values()), dtype=row.dtype, device=row.device
            )
        if params.repetition_penalty != 1.0:
            seen = torch.unique(_token_tensor(sequence.token_ids, row))
            scores = row[seen]
            row[seen] = torch.where(
                scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
            )
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            output = _token_tensor(sequence.token_ids[sequence.num_prompt_tokens :], row)
            seen, counts = torch.unique(output, return_counts=True)
            row[seen] -= params.frequency_penalty * counts + params.presence_penalty
        if params.min_tokens or params.bad_words or params.allowed_token_ids:
            _bar_tokens(row, sequence, self._eos_token_ids)
        if (mask := token_mask(sequence, self._eos_token_ids)) is not None:
            keep_only(row, mask)


def _token_tensor(token_ids: list[int], row: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=row.device)


def _bar_tokens(row: Tensor, sequence: Sequence, eos_token_ids: Iterable[int]) -> None:
    """Sets the logits of what the request rules out to -inf: on one row `[vocab]`, in place."""
    barred = barred_tokens(sequence, eos_token_ids)
    left = left_of_allowed(sequence, barred)
    if left is not None:
        # One of these has to be drawn also where the model has overflowed, so none of them stays -inf.
        lowest = torch.finfo(row.dtype).min / 2
        ids = _token_tensor(left, row)
        kept = row[ids].nan_to_num_(nan=lowest, posinf=torch.inf, neginf=lowest)
        row.fill_(-torch.inf)
        row[ids] = kept
    elif barred:
        row[list(barred)] = -torch.inf


def _draw(logits: Tensor, rows: list[int], sequences: SequenceOf[Sequence]) -> list[int]:
    params = [sequences[row].sampling for row in rows]
    # A token's position is the number of tokens before it, wherever those were generated.
    numbers = uniforms([p.seed for p in params], [sequences[row].num_tokens for row in rows])
    # A model may overflow (float16) and a mask may leave nothing: neither must end the other rows' step.
    largest = torch.finfo(logits.dtype).max / 2
    chosen = logits[rows].nan_to_num_(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    # Shifted before dividing, so that a tiny temperature gives -inf and never inf - inf.
    chosen -= chosen.amax(dim=-1, keepdim=True).clamp_(min=-largest)
    chosen /= torch.tensor([p.temperature for p in params], device=chosen.device).unsqueeze(-1)
    weights = chosen.exp_()  # unnormalised probabilities; the largest of each row is 1
    for index, param in enumerate(params):
        if (allowed := allowed_tokens(weights[index], param)) is not None:
            kept = weights[index][allowed]
            weights[index].zero_()
            weights[index][allowed] = kept
    return _invert(weights, torch.from_numpy(numbers).to(weights.device)).tolist()


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
