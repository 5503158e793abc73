"""The queue twin: one server, one queue, and work that is known. For limits on TTFT."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.knee.arrival_law import draw_gaps
from loadtest.knee.observations import Floats, Requests
from loadtest.knee.seen_lengths import Lengths, or_mean
from loadtest.knee.twin import NUM_GROUPS


@dataclass(frozen=True, slots=True)
class WorkWeights:
    """What a request costs: so much per prompt token, and so much per token of the answer."""

    per_prompt_token: float
    per_output_token: float

    def of(self, num_prompt_tokens: Floats, num_output_tokens: Floats) -> Floats:
        return self.per_prompt_token * num_prompt_tokens + self.per_output_token * num_output_tokens


@dataclass(frozen=True, slots=True)
class QueueTwin:
    """One queue, one server, first come first served: wait = max(0, wait + work - gap). For TTFT.

    The score is the wait in seconds. An engine with slots makes nobody wait before they are full, which
    one server does; the threshold takes up the difference.
    """

    capacity: float  # requests/s of the mean length
    weights: WorkWeights
    mean_work: float  # in the units of the weights
    threshold_guess: float
    threshold_log_sd: float = 1.0
    name: str = "queue_twin"
    num_requests: int = 8_000

    def _work_s(self, num_prompt_tokens: Floats, num_output_tokens: Floats) -> Floats:
        return self.weights.of(num_prompt_tokens, num_output_tokens) / (self.mean_work * self.capacity)

    def scores(self, probes: list[Requests]) -> list[Floats]:
        scores = []
        for probe in probes:
            work_s = self._work_s(or_mean(probe.num_prompt_tokens), or_mean(probe.num_output_tokens))
            scores.append(queue_waits(np.diff(probe.due_s, prepend=probe.due_s[:1]), work_s))
        return scores

    def long_run(self, rates: Floats, cv: float, lengths: Lengths, seed: int) -> Floats:
        rng = np.random.default_rng([seed, 1])
        size = (NUM_GROUPS, self.num_requests)
        gaps = draw_gaps(cv, size, rng)
        work_s = self._work_s(*lengths.draw(size, rng))
        cut = self.num_requests // 20  # from an empty queue to its usual length
        return np.stack([queue_waits(gaps / rate, work_s)[:, cut:] for rate in rates])


def queue_waits(gaps_s: Floats, work_s: Floats) -> Floats:
    """Lindley's recursion along the last axis; a gap is that before the request. Begins empty."""
    steps = np.zeros_like(gaps_s)
    steps[..., 1:] = work_s[..., :-1] - gaps_s[..., 1:]
    walk = np.cumsum(steps, axis=-1)
    return walk - np.minimum.accumulate(walk, axis=-1)
