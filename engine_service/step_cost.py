"""What a step costs in time, learned from the steps that were made.

    seconds = overhead    reading the weights, planning, launches, attention of those that decode
            + a * tokens
            + b * pairs   of a prompt's token and one that it attends to

Engines that choose chunks by prediction use such terms with coefficients that were measured beforehand:
a table for one accelerator (vLLM-Ascend, dynamic batch), a fit at start (SGLang, dynamic chunking).
Here they are learned while serving: a machine that is shared, or throttles, is not the one that was measured.

A step's time is not a straight line in its tokens: on CPUs it is flat while reading the weights takes
longer than the arithmetic. But the line need not fit everywhere, only where the engine works, and there it
is drawn anew all the time. Lines of several pieces were tried, and learned more slowly; so was a term for
what decoding rows attend to, which changed nothing: contexts grow slowly, and the overhead follows.

The coefficients follow by recursive least squares, in the form of a Kalman filter whose state walks
randomly (Haykin, Adaptive Filter Theory), with three peculiarities:
- What befalls a machine befalls all its costs at once. So the walk goes along the coefficients
  themselves: decoding that slows down foretells slower chunks.
- What is not seen for long becomes uncertain, but never more than at the start (Kulhavy and Zarrop, On a
  general concept of forgetting, 1993): else the first prompt after hours of decoding would upset everything.
- A surprise counts for at most three standard deviations (Huber). However long a hiccup is, it moves
  predictions by some twenty per cent; a change that lasts is followed within some ten steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_service.sequence import StepPlan

_OVERHEAD_TOKENS = 64  # the overhead may be what about so many tokens cost
_PAIR_SHARE = 1e-3  # about what a pair costs, of what a token does
_NOISE = 0.15  # standard deviation of a step's time, as a share of it
_SPEED_DRIFT = 0.05  # standard deviation of the machine's speed from one step to the next, as a share of it
_FORGETTING = 3e-4  # share of the first uncertainty that comes back with each step
_LARGEST_SURPRISE = 3.0  # standard deviations


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on. Decoding rows are those that go on with an answer."""

    num_tokens: int  # of all rows
    num_decoding: int = 0  # rows; they are not told apart from other tokens by what they cost
    prefill_pairs: float = 0.0  # of the other rows, see pairs_of_chunk

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        num_decoding = 0
        prefill_pairs = 0.0
        for row in plan.rows:
            if row.start >= row.sequence.num_prompt_tokens:
                num_decoding += 1
            else:
                prefill_pairs += pairs_of_chunk(row.start, row.num_tokens)
        return cls(plan.num_tokens, num_decoding, prefill_pairs)

    def features(self) -> tuple[float, float, float]:
        """What the coefficients are multiplied by, scaled so that the last two are of about one size."""
        return 1.0, float(self.num_tokens), self.prefill_pairs * _PAIR_SHARE


def pairs_of_chunk(start: int, num_tokens: int) -> float:
    """Of a token of `[start, start + num_tokens)` and one that it attends to: itself, or one before it."""
    return num_tokens * (start + (num_tokens + 1) / 2)


class StepCost:
    """Predicts the time of steps. Knows nothing before the first `learn`."""

    def __init__(self) -> None:
        self._coefficients: npt.NDArray[np.float64] | None = None  # in seconds; none is negative
        self._covariance: npt.NDArray[np.float64] = np.zeros((3, 3))
        self._first_covariance = self._covariance

    @property
    def is_known(self) -> bool:
        return self._coefficients is not None

    def predict_s(self, shape: StepShape) -> float:
        assert self._coefficients is not None, "nothing was learned yet"
        return float(self._coefficients @ shape.features())

    def learn(self, shape: StepShape, duration_s: float) -> None:
        """Takes in a step that was made; `duration_s` is more than 0."""
        if self._coefficients is None:
            self._begin(shape, duration_s)
        assert self._coefficients is not None
        features = np.array(shape.features())
        expected_s = float(self._coefficients @ features)
        self._covariance += _FORGETTING * (self._first_covariance - self._covariance)
        self._covariance += _SPEED_DRIFT**2 * np.outer(self._coefficients, self._coefficients)
        covariance_with_time = self._covariance @ features
        variance = float(features @ covariance_with_time) + (_NOISE * expected_s) ** 2
        limit_s = _LARGEST_SURPRISE * math.sqrt(variance)
        surprise_s = min(max(duration_s - expected_s, -limit_s), limit_s)
        self._coefficients += covariance_with_time * (surprise_s / variance)
        self._covariance -= np.outer(covariance_with_time, covariance_with_time) / variance
        self._raise_to_zero(self._coefficients)

    def _raise_to_zero(self, coefficients: npt.NDArray[np.float64]) -> None:
        """What is negative; the others make room for it, as far as they are uncertain together with it.

        Else the prediction would be wrong again for the step that has just been learned.
        """
        for _ in coefficients:
            index = int(coefficients.argmin())
            if coefficients[index] >= 0:
                return
            coefficients -= self._covariance[index] * (coefficients[index] / self._covariance[index, index])
            coefficients[index] = 0.0
        np.maximum(coefficients, 0.0, out=coefficients)

    def _begin(self, shape: StepShape, duration_s: float) -> None:
        """Takes all of the first step for the cost of its tokens, so that larger ones seem dear at first."""
        per_token_s = duration_s / shape.num_tokens
        overhead_s = min(duration_s, per_token_s * _OVERHEAD_TOKENS)
        self._coefficients = np.array([0.0, per_token_s, 0.0])
        self._first_covariance = np.diag(np.array([overhead_s, per_token_s, per_token_s]) ** 2)
        self._covariance = self._first_covariance.copy()
