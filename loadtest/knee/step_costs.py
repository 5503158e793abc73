"""What an engine's steps cost, worked out from what its clients saw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.knee.observations import Floats, requests_of
from loadtest.knee.probe import Probe

UNKNOWN_STEP_TOKENS = 2048  # the usual setting, where the server does not tell
MIN_REQUESTS_OF_FIT = 12
MAX_MISFIT = 0.06  # of the TPOT: beyond, steps cost something else than batch and prompts
MIN_STEPS = 4  # of a request whose TPOT says what a step costs


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The engine as a twin sees it."""

    base_s: float
    per_sequence_s: float
    per_prefill_token_s: float
    num_slots: int
    max_step_tokens: int = UNKNOWN_STEP_TOKENS


@dataclass(frozen=True, slots=True)
class StepFit:
    """The costs of steps, and how far they are from explaining what clients saw."""

    costs: StepCosts
    misfit: float  # of the mean TPOT of the probe that they explain worst
    worst_kind: str  # of that probe

    @property
    def has_right_form(self) -> bool:
        """A straight line through an idle, a loaded and a saturated server, near all three."""
        return self.misfit <= MAX_MISFIT


def fit_step_costs(probes: list[Probe], num_slots: int) -> StepFit | None:
    """a, b and c by least squares from what clients saw.

    While a request decodes, each step costs a, and b for each sequence in it, and c for each prompt token:
    so the time of its n - 1 steps is a (n - 1) + b * (tokens that all requests got meanwhile) + c * (tokens
    of prompts that ended meanwhile). Probes weigh the same, however many requests they have, since a few
    single ones say as much about the form as thousands under load. None without enough requests whose
    lengths are known.
    """
    rows: list[Floats] = []
    times: list[Floats] = []
    kinds: list[str] = []
    for probe in probes:
        requests = requests_of([row for row in probe.requests if row.first_token_s is not None])
        knows_lengths = ~(np.isnan(requests.num_output_tokens) | np.isnan(requests.num_prompt_tokens))
        ended = knows_lengths & ~requests.failed & ~requests.cut_off
        lasts = ended & (requests.num_output_tokens >= MIN_STEPS + 1)
        if lasts.sum() < 3:
            continue
        first, end = requests.first_token_s, requests.end_s
        num_steps = requests.num_output_tokens - 1
        speed = np.where(ended, num_steps / np.maximum(end - first, 1e-9), np.nan)
        # Who was cut off, or told no length, took part in the batch all the same, at the usual speed.
        speed = np.where(np.isnan(speed), np.nanmedian(speed), speed)
        tokens = _tokens_between(first, end, speed)
        order = np.argsort(first)
        prompts = np.concatenate([[0.0], np.cumsum(np.nan_to_num(requests.num_prompt_tokens[order]))])
        prefilled = (
            prompts[np.searchsorted(first[order], end, side="right")]
            - prompts[np.searchsorted(first[order], first, side="right")]
        )
        rows.append(np.stack([num_steps, tokens, prefilled], axis=1)[lasts] / num_steps[lasts, None])
        times.append(((end - first) / num_steps)[lasts])
        kinds.append(probe.kind)
    if not rows or sum(len(one) for one in times) < MIN_REQUESTS_OF_FIT:
        return None
    matrix, tpot = np.concatenate(rows), np.concatenate(times)
    weights = np.concatenate([np.full(len(one), 1 / math.sqrt(len(one)) / one.mean()) for one in times])
    coefficients = _nonnegative_least_squares(matrix * weights[:, None], tpot * weights)
    a, b, c = (float(one) for one in coefficients)
    if a <= 0:
        return None
    misfits = [
        abs(float((row @ coefficients).mean() / one.mean()) - 1) for row, one in zip(rows, times, strict=True)
    ]
    worst = int(np.argmax(misfits))
    return StepFit(StepCosts(a, b, c, num_slots), misfits[worst], kinds[worst])


def _tokens_between(first_s: Floats, end_s: Floats, speed: Floats) -> Floats:
    """Tokens that all requests got within each one's decoding time; each one's come at its mean speed, in
    tokens/s."""
    times = np.concatenate([first_s, end_s])
    changes = np.concatenate([speed, -speed])
    order = np.argsort(times, kind="stable")
    times, total = times[order], np.cumsum(changes[order])
    so_far = np.concatenate([[0.0], np.cumsum(total[:-1] * np.diff(times))])
    between: Floats = np.interp(end_s, times, so_far) - np.interp(first_s, times, so_far)
    return between


def _nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """By leaving out what comes out negative: with three columns that is all there is to it."""
    kept: NDArray[np.int64] = np.arange(matrix.shape[1])
    result = np.zeros(matrix.shape[1])
    while len(kept):
        solution = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if (solution >= 0).all():
            result[kept] = solution
            break
        kept = np.delete(kept, int(np.argmin(solution)))
    return result
