"""Many runs of a batching engine at once: the step-time model, simulated in lockstep with numpy.

A step costs a + b * (sequences that decode) + c * (prompt tokens computed in it). Prompts are taken first
come, first served, in chunks of what the decoding sequences leave of the step's tokens, while there are
slots. All runs make their n-th step together, each at its own time, so that one numpy operation serves them
all: a hundred runs cost little more than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.knee.observations import Floats
from loadtest.knee.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """[num_runs, num_requests]"""

    ttft_s: Floats
    tpot_s: Floats  # 0 for answers of one token
    e2el_s: Floats


def simulate_batches(
    costs: StepCosts, due_s: Floats, num_prompt_tokens: Floats, num_output_tokens: Floats
) -> BatchTimes:
    """Runs that begin empty. Arrays are [num_runs, num_requests], due times ascending in each run.

    A run with fewer requests is filled up with due times of infinity; their latencies are nan.
    """
    num_runs, num_requests = due_s.shape
    runs = np.arange(num_runs)
    # A sentinel behind the last request of each run is never due.
    due = np.concatenate([due_s, np.full((num_runs, 1), np.inf)], axis=1)
    prompts = np.concatenate([num_prompt_tokens, np.full((num_runs, 1), np.inf)], axis=1)
    outputs = np.concatenate([num_output_tokens, np.ones((num_runs, 1))], axis=1).astype(np.int64)
    ring = int(outputs.max()) + 1
    # Sequences whose last token comes with a step, by step % ring; runs lie side by side, as they are read.
    ends = np.zeros((ring, num_runs))
    head = np.zeros(num_runs, dtype=np.int64)  # the request whose prompt is computed, or will be next
    next_due = due[:, 0].copy()  # of the head
    left = prompts[:, 0].copy()  # of its prompt
    batch = np.zeros(num_runs)  # sequences that decode
    now = np.where(np.isfinite(next_due), next_due, 0.0)
    first_step = np.full((num_runs, num_requests + 1), -1, dtype=np.int64)
    step_ends: list[Floats] = []
    step = 0
    num_to_begin = int(np.isfinite(due_s).sum())
    while num_to_begin > 0 or batch.any():
        if not batch.all():  # an idle run goes on when its next request is due
            idle = (batch == 0) & (next_due > now) & (next_due < np.inf)
            now[idle] = next_due[idle]
        # A run that has ended keeps making empty steps, which nobody looks at.
        duration = costs.base_s + costs.per_sequence_s * batch
        ending = ends[step % ring]
        at = np.flatnonzero((next_due <= now) & (batch < min(costs.num_slots, costs.max_step_tokens)))
        if len(at):
            budget = costs.max_step_tokens - batch[at]
            slots = costs.num_slots - batch[at]
        while len(at):
            taken = np.minimum(budget, left[at])
            left[at] -= taken
            budget -= taken
            duration[at] += costs.per_prefill_token_s * taken
            is_begun = left[at] == 0
            at, budget, slots = at[is_begun], budget[is_begun], slots[is_begun] - 1
            whose = head[at]
            first_step[at, whose] = step
            ends[(step + outputs[at, whose] - 1) % ring, at] += 1  # each run is in `at` once
            batch[at] += 1
            num_to_begin -= len(at)
            head[at] += 1
            left[at] = prompts[at, whose + 1]
            next_due[at] = due[at, whose + 1]
            goes_on = (next_due[at] <= now[at]) & (slots > 0) & (budget > 0)
            at, budget, slots = at[goes_on], budget[goes_on], slots[goes_on]
        now = now + duration
        step_ends.append(now)
        batch -= ending
        ending[:] = 0
        step += 1
    if not step_ends:
        nothing = np.full(due_s.shape, np.nan)
        return BatchTimes(nothing, nothing, nothing)
    times = np.stack(step_ends)  # [num_steps, num_runs]
    first_step = first_step[:, :-1]
    has_run = first_step >= 0
    num_tokens = outputs[:, :-1]
    rows = np.broadcast_to(runs[:, None], first_step.shape)
    first_s = times[np.where(has_run, first_step, 0), rows]
    end_s = times[np.where(has_run, first_step + num_tokens - 1, 0), rows]
    unknown = np.where(has_run, 0.0, np.nan)
    with np.errstate(invalid="ignore"):
        return BatchTimes(
            ttft_s=first_s - due_s + unknown,
            tpot_s=(end_s - first_s) / np.maximum(num_tokens - 1, 1) + unknown,
            e2el_s=end_s - due_s + unknown,
        )
