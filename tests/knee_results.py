"""Results of `headrace knee` for tests of what reads them: real latencies of a batching engine, on no clock.

The search itself has tests of its own; here the rates are given, and so are the verdicts on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.knee.probe import Probe, ProbedRequest, ProbeKind, ServerSample
from loadtest.knee.result import (
    CurvePoint,
    KneeResult,
    Phase,
    SloCapacity,
    SloRow,
    Status,
    TierResult,
)
from loadtest.simulator.batching_model import BatchingModel, BatchingParameters
from loadtest.validity import ValidityCheck

NUM_BLOCKS = 4000  # of the engine, 16 tokens each
SLO = SloRow(name="interactive", attainment=0.95, ttft_ms=500.0, tpot_ms=50.0)


def simulated_probe(
    rate: float,
    *,
    cv: float = 1.0,
    begin_s: float = 0.0,
    duration_s: float = 30.0,
    seed: int = 0,
    failed_share: float = 0.0,
    kind: ProbeKind = "open_loop",
    reports: bool = True,
) -> Probe:
    """Arrivals of a gamma process into a `BatchingModel` of the default parameters."""
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, size=int(rate * duration_s * 2) + 20)
    due = np.cumsum(gaps)
    due = due[due < duration_s]
    prompts = np.clip(rng.lognormal(6.15, 0.7, len(due)), 8, 4000).astype(int)
    outputs = np.clip(rng.lognormal(4.8, 0.65, len(due)), 1, 1000).astype(int)
    requests = [
        ProbedRequest(
            due_s=float(at),
            sent_s=float(at) + 0.0005,
            num_prompt_tokens=int(prompt),
            num_output_tokens=int(output),
            trace_id=f"{seed + 1:016x}{number + 1:016x}",
        )
        for number, (at, prompt, output) in enumerate(zip(due, prompts, outputs, strict=True))
    ]
    model: BatchingModel[int] = BatchingModel(BatchingParameters())
    samples: list[ServerSample] = []
    now_s, submitted, num_done = 0.0, 0, 0
    num_generated = num_prompt = 0
    while num_done < len(requests):
        while submitted < len(requests) and due[submitted] <= now_s:
            one = requests[submitted]
            if rng.random() < failed_share:
                one.failed, one.error, one.end_s = True, "http_status: 503", now_s + 0.01
                one.num_output_tokens = None
                num_done += 1
            else:
                model.submit(submitted, int(prompts[submitted]), int(outputs[submitted]))
                num_prompt += int(prompts[submitted])
            submitted += 1
        step = model.next_step()
        if step is None:
            if submitted >= len(requests):
                break
            now_s = float(due[submitted])
            continue
        now_s += step.duration_s
        num_generated += len(step.first) + len(step.more)
        for number in step.first:
            requests[number].first_token_s = now_s
        for number in step.finished:
            requests[number].end_s = now_s
            num_done += 1
        if reports and now_s >= len(samples):
            samples.append(
                ServerSample(
                    at_s=now_s,
                    running=model.num_running,
                    waiting=model.num_waiting,
                    kv_usage=min(1.0, model.num_kv_tokens / 16 / NUM_BLOCKS),
                    generation_tokens=num_generated,
                    prompt_tokens=num_prompt,
                    prefix_queries=num_prompt,
                    prefix_hits=0.0,
                    preemptions=0.0,
                )
            )
    return Probe(
        kind=kind,
        rate=rate,
        cv=cv,
        begin_s=begin_s,
        warm_cut_s=5.0,
        end_s=duration_s,
        drained_s=max(now_s, duration_s),
        requests=requests,
        samples=samples,
    )


def unloaded_probe() -> Probe:
    """A few requests, one after the other."""
    requests = [
        ProbedRequest(
            due_s=2.0 * number,
            sent_s=2.0 * number,
            first_token_s=2.0 * number + 0.03,
            end_s=2.0 * number + 1.55,
            num_prompt_tokens=600,
            num_output_tokens=150,
            trace_id=f"{number + 1:032x}",
        )
        for number in range(8)
    ]
    return Probe(kind="unloaded", concurrency=1, begin_s=0.0, end_s=16.0, drained_s=16.0, requests=requests)


def tier_result(
    rate: float = 15.0,
    ci90: tuple[float, float] = (14.2, 15.7),
    *,
    slo: SloRow = SLO,
    arrival_cv: float = 1.0,
    status: Status = "resolved",
    **fields: Any,
) -> TierResult:
    curve = [
        CurvePoint(rate=at, attainment=share, low=max(0.0, share - 0.03), high=min(1.0, share + 0.02))
        for at in np.linspace(0.6 * rate, 1.2 * rate, 25).tolist()
        for share in [float(1 / (1 + np.exp(30 * (np.log(at / rate)) - np.log(19))))]
    ]
    values: dict[str, Any] = {
        "name": slo.name,
        "slo": slo,
        "arrival_cv": arrival_cv,
        "slo_capacity": SloCapacity(
            rate=rate, ci90=ci90, method="queue_twin", n_eff=31.0, design_effect=58.0
        ),
        "feasible_max": 14.0,
        "infeasible_min": 16.5,
        "first_breach": None,
        "binding_constraint": "ttft",
        "boundary_type": "cliff",
        "status": status,
        "validated": False,
        "knee_fraction": rate / 16.9,
        "curve": curve,
    }
    return TierResult(**(values | fields))


def knee_result(
    tiers: Sequence[TierResult] | None = None, probes: Sequence[Probe] | None = None, **fields: Any
) -> KneeResult:
    """One that a search of the default simulated engine could have had."""
    tiers = [tier_result()] if tiers is None else list(tiers)
    first = tiers[0] if tiers else None
    values: dict[str, Any] = {
        "commit": "0123456789abcdef",
        "machine": {"cpu_model": "a processor", "num_cores": 8, "memory_bytes": 2**35, "system": "Linux"},
        "started_at": "2026-11-30T12:00:00+00:00",
        "command": "headrace knee --url http://127.0.0.1:8080 --slo ttft=500ms,tpot=50ms",
        "url": "http://127.0.0.1:8080",
        "model": "chat",
        "workload": {"dataset_name": "random", "random_input_len": 600, "random_output_len": 150, "seed": 0},
        "slo": [tier.slo for tier in tiers],
        "slo_capacity": first.slo_capacity if first else None,
        "tiers": tiers,
        "shape_knee": None,
        "saturation_rate": 16.9,
        "saturation_ci90": (16.4, 17.4),
        "knee_fraction": first.knee_fraction if first else None,
        "arrival_cv": first.arrival_cv if first else 1.0,
        "status": first.status if first else "unresolved",
        "reasons": [],
        "validity": [
            ValidityCheck(
                check="delivered rate",
                passed=True,
                value=0.002,
                limit=0.01,
                reason="0.2 % off what was asked for",
            ),
            ValidityCheck(
                check="prefix hits", passed=True, value=None, limit=0.02, reason="the server does not tell"
            ),
        ],
        "not_reported_by_server": ["requests that a limit refused"],
        "phases": [Phase(name="warm-up", seconds=12.0), Phase(name="open-loop probes", seconds=190.0)],
        "seconds_spent": 240.0,
        "budget_s": 300.0,
        "probes": list(probes or []),
    }
    return KneeResult(**(values | fields))
