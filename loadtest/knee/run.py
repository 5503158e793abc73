"""`headrace knee` against a live server: searches, shows how far it is, writes and prints what it found."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import sys
from datetime import datetime
from typing import Any

import aiohttp
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
EXIT_NOT_WRITTEN = 1
EXIT_INTERRUPTED = 130  # as shells tell a SIGINT


def run_knee(options: KneeOptions) -> int:
    """The exit code. Raises ConfigError for a server that names no model or is not there."""
    nonce = secrets.randbits(32) if options.load.nonce is None else options.load.nonce
    declared = declared_hit_share(options.load)
    started_at = datetime.now().astimezone()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model = runner.run(_model_of(options.load))
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
    print(text_of(result), flush=True)  # first: it must not be lost with a disk that is full
    is_written = write_files(result, options)
    if outcome.interrupted_in is not None:
        return EXIT_INTERRUPTED
    if not is_written:
        return EXIT_NOT_WRITTEN
    return EXIT_CODES[result.status]


def write_files(result: KneeResult, options: KneeOptions) -> bool:
    """Whether all that was asked for could be written; says on stderr what was, and what could not be."""
    is_written = True
    if options.json_file is not None:
        try:
            write_result(result, options.json_file)
            print(f"result written to {options.json_file}", file=sys.stderr)
        except ConfigError as error:
            is_written = False
            print(f"error: --json: {error.message}", file=sys.stderr)
    if options.report_file is not None:
        from loadtest.report.html import write_html  # local: matplotlib, which only a report needs

        try:
            write_html(result, options.report_file, flag="--report")
            print(f"report written to {options.report_file}", file=sys.stderr)
        except (ConfigError, OSError) as error:
            is_written = False
            print(f"error: --report: {error}", file=sys.stderr)
    return is_written


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
            search = KneeSearch(prober, settings, on_progress)
            try:
                outcome = await search.run()
            except asyncio.CancelledError:  # Ctrl-C: what is known is worth more than nothing
                outcome = search.interrupted()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()  # requests of the probe that was under way
        return outcome, prober.not_reported


async def _model_of(load: BenchServeOptions) -> str:
    """The one that was named, if there is a server at all, which need not list its models."""
    try:
        first = await first_model(load.models_url, load.authorization_headers)
        return load.model or first
    except LookupError as error:
        if isinstance(error.__cause__, OSError | aiohttp.ClientError):
            raise ConfigError(str(error), "--url") from error
        if load.model is not None:
            return load.model
        raise ConfigError(f"{error}; name the model, or check --url", "--model") from error


def _target(load: BenchServeOptions, model: str) -> Target:
    return Target(
        url=load.url,
        backend=load.backend,
        model=model,
        headers=load.authorization_headers,
        sampling=load.sampling,
        ignore_eos=load.ignores_eos,
        timeout_s=load.request_timeout_s,
        trace_share=load.trace_sample_share,
        keeps_text=False,
    )
