"""The largest batch and chunk that keep a target for the inter-token latency (`target_itl_ms`).

Whoever decodes gets one token per step, so the time of a step is everybody's inter-token latency, and what
makes a step long is the chunk of a prompt in it. Sarathi-Serve (arXiv 2403.02310) bounds the tokens of a
step by a budget that is found by profiling, once for a machine and a target; `max_num_batched_tokens` is that
budget, set by hand. One number is too small where few decode at short contexts, and too large where many
do at long ones. So here it is found for each step anew, from what steps have cost (`step_cost.py`).

Why by prediction, not by control (raise while all is well, lower when not): a controller finds the limit by
going beyond it, again and again, and what it has found for 8 decoding sequences is wrong for 16. A
prediction learns also from steps far below the limit, so nothing has to be tried to find out that more
would be fine again.

What is aimed at: of 100 steps in which somebody decodes, 95 take no longer than the target; and so it is
with those that come near it, taken by themselves. For that, predictions are multiplied by a margin, the 95th
percentile of what such steps took, as a share of what was predicted. Single hiccups do not touch it. Where
every tenth step is a hiccup, no batch keeps the target; the margin's bound saves the throughput there.

What is not promised:
- A prompt gets `min_chunk_tokens` in each step even if the target is missed by that: it would starve
  otherwise. The batch is limited so that this much fits beside it, so it comes to that only when steps
  have become slower since, or contexts longer.
- Nobody is thrown out to get back within the target; the batch shrinks as sequences end.
- A target that a single sequence misses is missed. The limits stand at their least, and `report` says so.

A step in which nobody decodes has nobody to wait for it, and may use all that is configured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque

from engine_service.sequence import StepPlan
from engine_service.step_cost import StepCost, StepShape, pairs_of_chunk
from engine_service.step_limits import LimitsReport

QUANTILE = 0.95  # of steps with decoding rows that keep the target

# Both limits grow to at most so many times the largest of the last steps. So however wrong a prediction is, a
# step takes hardly more than twice what one before it took; and any size is reached in a few steps.
_GROWTH = 2
_GROWTH_STEPS = 16
_FIRST_CHUNK_TOKENS = 64
_FIRST_NUM_SEQS = 8
_FIRST_MARGIN = 1.2
_LARGEST_MARGIN = 3.0
_MARGIN_STEPS = 64  # that it is taken over
_MARGIN_LEAST_STEPS = 16  # before it may fall below the first one
_REPORTED_STEPS = 100


class StepTimeTarget:
    """The StepLimits that keep a target."""

    def __init__(
        self,
        *,
        target_itl_s: float,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        min_chunk_tokens: int,
    ) -> None:
        """The limits never exceed `max_num_seqs` and `max_num_batched_tokens`."""
        self._target_s = target_itl_s
        self._configured_num_seqs = max_num_seqs
        self._configured_num_tokens = max_num_batched_tokens
        self._min_chunk_tokens = min_chunk_tokens
        self._cost = StepCost()
        self._margin = _FIRST_MARGIN
        self._overruns: deque[float] = deque(maxlen=_MARGIN_STEPS)  # times taken, as shares of predictions
        self._decode_steps_s: deque[float] = deque(maxlen=_REPORTED_STEPS)
        self._chunks = deque([_FIRST_CHUNK_TOKENS // _GROWTH], maxlen=_GROWTH_STEPS)  # beside decoding rows
        self._batches = deque([_FIRST_NUM_SEQS // _GROWTH], maxlen=_GROWTH_STEPS)  # decoding rows
        self._prefill_start = 0  # where the prompt goes on that is the furthest; 0 for a new one
        self._max_num_seqs = min(_FIRST_NUM_SEQS, max_num_seqs)
        self._last_max_num_tokens = max_num_batched_tokens  # as answered

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    def max_num_tokens(self, num_decoding: int) -> int:
        self._last_max_num_tokens = min(self._find_num_tokens(num_decoding), self._configured_num_tokens)
        return self._last_max_num_tokens

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        if not 0 < duration_s < math.inf:  # a clock without resolution; there is nothing to learn from it
            return
        shape = StepShape.of(plan)
        if shape.num_decoding:
            self._decode_steps_s.append(duration_s)
            if self._cost.is_known:
                self._adjust_margin(self._cost.predict_s(shape), duration_s)
        self._cost.learn(shape, duration_s)
        self._batches.append(shape.num_decoding)
        if 0 < shape.num_decoding < shape.num_tokens:
            self._chunks.append(shape.num_tokens - shape.num_decoding)
        ends = ((row.start + row.num_tokens, row.sequence.num_prompt_tokens) for row in plan.rows)
        self._prefill_start = max((end for end, prompt_end in ends if end < prompt_end), default=0)
        self._max_num_seqs = self._find_num_seqs()

    def report(self) -> LimitsReport:
        p95_s = _quantile(self._decode_steps_s) if self._decode_steps_s else 0.0
        return LimitsReport(
            max_num_seqs=self._max_num_seqs,
            max_num_tokens=self._last_max_num_tokens,
            decode_step_p95_ms=p95_s * 1e3,
            meets_target=p95_s <= self._target_s,
        )

    def _adjust_margin(self, expected_s: float, duration_s: float) -> None:
        """By steps that come near the target; there are more of the others, and they would water it down."""
        if expected_s * self._margin > self._target_s / 2:
            self._overruns.append(duration_s / expected_s)
            least = 1.0 if len(self._overruns) >= _MARGIN_LEAST_STEPS else _FIRST_MARGIN
            self._margin = min(max(_quantile(self._overruns), least), _LARGEST_MARGIN)

    def _find_num_tokens(self, num_decoding: int) -> int:
        if num_decoding == 0:
            return self._configured_num_tokens
        least = self._min_chunk_tokens
        most = max(least, _GROWTH * max(self._chunks))
        if not self._cost.is_known:
            return num_decoding + most

        def time_s(num_prefill_tokens: int) -> float:
            return self._time_s(num_decoding, num_prefill_tokens)

        num_fitting = bisect_right(range(least, most + 1), self._target_s, key=time_s)
        return num_decoding + max(least, least + num_fitting - 1)

    def _find_num_seqs(self) -> int:
        """Sequences that can decode beside the least chunk."""
        most = min(max(_GROWTH * max(self._batches), _FIRST_NUM_SEQS), self._configured_num_seqs)

        def time_s(num_seqs: int) -> float:
            return self._time_s(num_seqs, self._min_chunk_tokens)

        return max(1, bisect_right(range(1, most + 1), self._target_s, key=time_s))

    def _time_s(self, num_decoding: int, num_prefill_tokens: int) -> float:
        """Of a step to come, the margin included."""
        shape = StepShape(
            num_decoding + num_prefill_tokens,
            num_decoding,
            pairs_of_chunk(self._prefill_start, num_prefill_tokens),
        )
        return self._cost.predict_s(shape) * self._margin


def _quantile(values: deque[float]) -> float:
    return sorted(values)[math.ceil(QUANTILE * len(values)) - 1]
