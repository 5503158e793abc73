"""`headrace knee` against a live server: searches, shows how far it is, writes and prints what it found."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import sys
from datetime import datetime
from typing import Any

import msgspec
import uvloop

from loadtest.client import Target, first_model
from loadtest.knee.live_prober import LiveProber, LiveTarget
from loadtest.knee.options import KneeOptions
from loadtest.knee.procedure import KneeSearch, SearchOutcome, SearchSettings
from loadtest.knee.progress_bar import progress_bar
from loadtest.knee.result import KneeResult, Status, write_result
from loadtest.knee.text import text_of
from loadtest.knee.verdict import judge, slo_row
from loadtest.machine import checkout_commit, describe_machine
from loadtest.options import BenchServeOptions
from loadtest.workload import build_workload
from shared.errors import ConfigError

EXIT_CODES: dict[Status, int] = {
    "resolved": 0,
    "unresolved": 0,
    "infeasible": 3,
    "client_bound": 4,
    "invalid": 5,
}


def run_knee(options: KneeOptions) -> int:
    """The exit code. Raises ConfigError for a server that names no model, and for a file that cannot be
    written."""
    nonce = secrets.randbits(32) if options.load.nonce is None else options.load.nonce
    declared = declared_hit_share(options.load)
    started_at = datetime.now().astimezone()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model = options.load.model or runner.run(_ask_model(options.load))
        settings = SearchSettings(
            tiers=options.tiers,
            cvs=options.cvs,
            budget_s=options.budget_s,
            tolerance=options.tolerance,
            validate=options.validate,
            declared_hit_share=declared,
            max_concurrency=options.max_concurrency,
            seed=options.load.seed,
        )
        live = LiveTarget(options.load, _target(options.load, model), nonce)
        outcome, not_reported = runner.run(_search(live, settings, shows_progress=options.shows_progress))
    result = result_of(outcome, options, model, nonce, started_at, not_reported)
    if options.json_file is not None:
        write_result(result, options.json_file)
    print(text_of(result), flush=True)
    if options.json_file is not None:
        print(f"result written to {options.json_file}", file=sys.stderr)
    if options.report_file is not None:
        from loadtest.report.html import write_html  # local: matplotlib, which only a report needs

        write_html(result, options.report_file, flag="--report")
        print(f"report written to {options.report_file}", file=sys.stderr)
    return EXIT_CODES[result.status]


def result_of(
    outcome: SearchOutcome,
    options: KneeOptions,
    model: str,
    nonce: int,
    started_at: datetime,
    not_reported: list[str],
) -> KneeResult:
    """The file's content."""
    verdict = judge(outcome)
    first = verdict.tiers[0] if verdict.tiers else None
    saturation = outcome.saturation
    return KneeResult(
        commit=checkout_commit(),
        machine=dataclasses.asdict(describe_machine()),
        started_at=started_at.isoformat(timespec="seconds"),
        command=options.command_line,
        url=options.load.url,
        model=model,
        workload=described_workload(options.load, nonce),
        slo=[slo_row(tier) for tier in options.tiers],
        slo_capacity=None if first is None else first.slo_capacity,
        tiers=verdict.tiers,
        shape_knee=verdict.shape_knee,
        saturation_rate=None if saturation is None else saturation.rate,
        saturation_ci90=None if saturation is None else saturation.ci90,
        knee_fraction=None if first is None else first.knee_fraction,
        arrival_cv=options.cvs[0],
        status=verdict.status,
        reasons=verdict.reasons,
        validity=verdict.validity,
        not_reported_by_server=not_reported,
        phases=outcome.phases,
        seconds_spent=outcome.seconds_spent,
        budget_s=options.budget_s,
        probes=outcome.probes,
    )


def described_workload(load: BenchServeOptions, nonce: int) -> dict[str, Any]:
    """What another run needs to send the same kind of requests."""
    described: dict[str, Any] = {"dataset_name": load.dataset_name, "backend": load.backend}
    if load.dataset_path is not None:
        described["dataset_path"] = str(load.dataset_path)
    prefix = {"random": "random_", "txt-slices": "random_", "prefix_repetition": "prefix_repetition_"}.get(
        load.dataset_name
    )
    if prefix is not None:
        described |= {
            field.name: value
            for field in dataclasses.fields(load)
            if field.name.startswith(prefix) and (value := getattr(load, field.name)) is not None
        }
    return {
        **described,
        "ignore_eos": load.ignores_eos,
        "declared_prefix_hit_share": declared_hit_share(load),
        "seed": load.seed,
        "nonce": nonce,
        **msgspec.to_builtins(load.sampling),
    }


def declared_hit_share(load: BenchServeOptions) -> float:
    """Of prompt tokens, what the data set implies for a run of many prompts, or what was declared."""
    if load.prefix_hit_share is not None:
        return load.prefix_hit_share
    if load.dataset_name not in ("random", "prefix_repetition"):
        return 0.0
    return build_workload(load, 1000, (0,)).prefix_hit_share or 0.0


async def _search(
    live: LiveTarget, settings: SearchSettings, *, shows_progress: bool
) -> tuple[SearchOutcome, list[str]]:
    async with LiveProber(live) as prober:
        with progress_bar(settings, prober) if shows_progress else contextlib.nullcontext() as on_progress:
            outcome = await KneeSearch(prober, settings, on_progress).run()
        return outcome, prober.not_reported


async def _ask_model(load: BenchServeOptions) -> str:
    try:
        return await first_model(load.models_url, _request_headers(load))
    except LookupError as error:
        raise ConfigError(f"{error}; name the model, or check --url", "--model") from error


def _target(load: BenchServeOptions, model: str) -> Target:
    return Target(
        url=load.url,
        backend=load.backend,
        model=model,
        headers=_request_headers(load),
        sampling=load.sampling,
        ignore_eos=load.ignores_eos,
        timeout_s=load.request_timeout_s,
        trace_share=load.trace_sample_share,
        keeps_text=False,
    )


def _request_headers(load: BenchServeOptions) -> dict[str, str]:
    key = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    return {**key, **load.headers}
