"""`headrace bench serve`: builds the workload, runs it once per concurrency, reports."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import uvloop

from loadtest.arrivals import (
    Ramp,
    arrival_offsets_ns,
    arrival_offsets_within_ns,
    measured_cv,
    ramp_offsets_ns,
    ramp_offsets_within_ns,
)
from loadtest.client import OpenAIClient, Target, first_model, request_head
from loadtest.client_check import check_client, client_bound_reasons, other_broken_reasons
from loadtest.console_table import failure_lines, serving_table, sweep_table, tenant_table
from loadtest.datasets.prompt import Item, Prompt, num_first_words
from loadtest.fleet import Fleet, WorkerDied, num_shares
from loadtest.generator import ClosedLoop, LoadRun, OpenLoop, Schedule, generate_load
from loadtest.machine import checkout_commit, describe_machine
from loadtest.options import SYNTHETIC_NAMES, BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.result_file import (
    Observations,
    Provenance,
    RunSetting,
    check_result_places,
    is_closed_loop,
    result_object,
    result_path,
    write_requests,
    write_result,
)
from loadtest.server_metrics import (
    ServerMetrics,
    ServerSample,
    ServerSampler,
    check_prefix_hits,
    not_reported,
)
from loadtest.summary import Summary, summarise
from loadtest.workload import build_workload, random_prompts
from shared.errors import ConfigError

EXIT_SUCCESS = 0
EXIT_REQUESTS_FAILED = 1
EXIT_NO_RESULT = 3
EXIT_INTERRUPTED = 130  # as shells have it for SIGINT

# Streams of random numbers that belong to one seed and nonce but must not repeat each other.
STREAM_MEASURED = 0
STREAM_WARMUP = 1
STREAM_ARRIVALS = 2


READY_CHECK_INTERVAL_S = 0.5
WORD_LENGTH_TOLERANCE = 1.5  # a template of chat adds a few tokens, and some words are two


@dataclass(frozen=True, slots=True)
class RunPlan:
    setting: RunSetting
    items: Sequence[Item]
    warmup_prompts: Sequence[Prompt]
    schedule: Schedule
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    run: LoadRun
    server_samples: list[ServerSample]
    server_problem: str | None


def run_bench_serve(options: BenchServeOptions) -> int:
    """Measures, prints, writes what was asked for; 0 if every request succeeded, else 1; 3 if a process of
    the generator died, so that there is no result; 130 if it was interrupted.

    Raises ConfigError for options that cannot work and for a server that names no model.
    """
    options.check()
    request_head(_target(options, ""))  # a header that is none, before anything is sent
    check_result_places(options)
    nonce = secrets.randbits(32) if options.nonce is None else options.nonce
    provenance = Provenance(describe_machine(), checkout_commit())
    rows: list[tuple[RunSetting, Summary]] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.ready_check_timeout_s > 0:
            runner.run(_wait_until_ready(options))
        model = options.served_model_name or options.model or runner.run(_ask_model(options))
        for run_index, concurrency in enumerate(options.concurrency_levels):
            plan = plan_run(options, model, concurrency, nonce, run_index)
            if run_index == 0:  # the runs of a sweep read one file
                for note in plan.notes:
                    print(f"note: {note}", file=sys.stderr)
            print(_announcement(options, plan), file=sys.stderr, flush=True)
            begun: list[RequestRecord] = []
            try:
                measured = runner.run(_measure(options, _target(options, model), plan, begun))
            except KeyboardInterrupt:
                print(_told_of_interruption(options, plan, begun, run_index), file=sys.stderr)
                return EXIT_INTERRUPTED
            except WorkerDied as error:
                print(f"error: {error}", file=sys.stderr)
                return EXIT_NO_RESULT
            summary = summarise(measured.run, options.metric_percentiles, options.goodput_ms)
            rows.append((plan.setting, summary))
            _report(options, plan, measured, summary, provenance)
    if options.concurrency_sweep:
        print(sweep_table(rows), flush=True)
    any_failed = any(summary.failed for _, summary in rows)
    return EXIT_REQUESTS_FAILED if any_failed else EXIT_SUCCESS


def plan_run(
    options: BenchServeOptions, model: str, concurrency: int | None, nonce: int, run_index: int
) -> RunPlan:
    """All that one run will do, fixed before its clock starts. Runs of a sweep share no prompts."""
    num_items = options.num_prompts_at(concurrency)
    offsets_ns = None
    if not options.is_self_timed:
        offsets_ns = _offsets_ns(options, num_items)
        num_items = num_items if offsets_ns is None else len(offsets_ns)
    if num_items == 0:
        raise ConfigError("no request is due in so short a time at this rate", "--duration")
    workload = build_workload(options, num_items, (nonce, run_index, STREAM_MEASURED))
    items = workload.items
    if offsets_ns is None:
        offsets_ns = workload.offsets_ns
    if offsets_ns is not None:
        items = items[: len(offsets_ns)]
        offsets_ns = offsets_ns[: len(items)]  # of a data set that ends before
    if is_closed_loop(options, concurrency):
        assert concurrency is not None, "a closed loop has a concurrency"
        schedule: Schedule = ClosedLoop(concurrency)
    else:
        schedule = OpenLoop([0] * len(items) if offsets_ns is None else offsets_ns, concurrency)
    return RunPlan(
        setting=RunSetting(
            model,
            concurrency,
            workload.num_requests,
            nonce,
            workload.num_distinct,
            workload.prefix_hit_share,
            None if offsets_ns is None else measured_cv(offsets_ns),
            _rps_changes(options, offsets_ns or []),
        ),
        items=items,
        warmup_prompts=random_prompts(options, options.num_warmups, (nonce, run_index, STREAM_WARMUP)),
        schedule=schedule,
        notes=workload.notes,
    )


def _offsets_ns(options: BenchServeOptions, num_items: int | None) -> list[int] | None:
    """None: requests are not due at times of their own. From the seed alone: another nonce changes the
    words, not the load."""
    rng = np.random.default_rng([options.seed, STREAM_ARRIVALS])
    ramp, rate, burstiness = _ramp(options), options.request_rate, options.burstiness
    if options.duration_s is not None:
        if ramp is not None:
            return ramp_offsets_within_ns(options.duration_s, ramp, burstiness, rng)
        return arrival_offsets_within_ns(options.duration_s, rate, burstiness, rng)
    if not options.has_schedule:
        return None
    if num_items is None:  # a trace without its times: as many as it has
        num_items = build_workload(options, None, (0,)).num_requests
    if ramp is not None:
        return ramp_offsets_ns(num_items, ramp, burstiness, rng)
    return arrival_offsets_ns(num_items, rate, burstiness, rng)


def _ramp(options: BenchServeOptions) -> Ramp | None:
    if options.ramp_up_strategy is None:
        return None
    assert options.ramp_up_start_rps is not None, "check() wants both rates of a ramp"
    assert options.ramp_up_end_rps is not None, "check() wants both rates of a ramp"
    return Ramp(options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)


def _rps_changes(options: BenchServeOptions, offsets_ns: Sequence[int]) -> list[tuple[int, int]]:
    """When the ramp reached another whole number of requests per second."""
    ramp = _ramp(options)
    changes: list[tuple[int, int]] = []
    if ramp is None:
        return changes
    for index, offset_ns in enumerate(offsets_ns):
        by_time = options.duration_s is not None
        share = offset_ns / 1e9 / options.duration_s if by_time else index / len(offsets_ns)  # type: ignore[operator]
        rps = int(ramp.rate_at(share))
        if not changes or changes[-1][0] != rps:
            changes.append((rps, offset_ns))
    return changes


def _told_of_interruption(
    options: BenchServeOptions, plan: RunPlan, begun: Sequence[RequestRecord], run_index: int
) -> str:
    """Records of other processes are lost with them."""
    saved = "nothing of this run was saved" if run_index else "nothing was saved"
    asked = plan.setting.num_prompts
    if num_shares(plan.items, plan.schedule, options.num_workers) > 1:
        return f"interrupted: how many of {asked} requests had ended is lost with the processes; {saved}"
    ended = sum(record.t_end_ns is not None for record in begun)
    return f"interrupted: {ended} of {asked} requests had ended; {saved}"


async def _measure(
    options: BenchServeOptions, target: Target, plan: RunPlan, begun: list[RequestRecord]
) -> Measured:
    """`begun` gets the records as requests are taken up, in this process."""
    async with contextlib.AsyncExitStack() as held:
        client = await held.enter_async_context(OpenAIClient(target))
        if plan.warmup_prompts:
            concurrency = plan.setting.max_concurrency or len(plan.warmup_prompts)
            warmup = await generate_load(plan.warmup_prompts, ClosedLoop(concurrency), client.send)
            for line in failure_lines(warmup.records):
                print(f"warm-up: {line}", file=sys.stderr)
        fleet = None
        num_workers = num_shares(plan.items, plan.schedule, options.num_workers)
        if num_workers > 1:
            fleet = await held.enter_async_context(Fleet(target, num_workers))
        metrics = await held.enter_async_context(ServerMetrics(options.metrics_page, _headers(options)))
        sampling: contextlib.AbstractAsyncContextManager[list[ServerSample]] = contextlib.nullcontext([])
        if options.scrapes_metrics:
            sampling = ServerSampler(metrics).running()
        async with sampling as samples:
            if fleet is not None:
                run = await fleet.generate_load(plan.items, plan.schedule)
            else:
                run = await generate_load(plan.items, plan.schedule, client.send, records=begun)
        return Measured(run, samples, metrics.problem)


async def _wait_until_ready(options: BenchServeOptions) -> None:
    """Raises ConfigError if the server lists no model within the time."""
    error: LookupError | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.ready_check_timeout_s):
            while True:
                try:
                    await first_model(options.models_url, _headers(options))
                except LookupError as why:
                    error = why
                    await asyncio.sleep(READY_CHECK_INTERVAL_S)
                else:
                    return
    raise ConfigError(
        f"the server is not ready after {options.ready_check_timeout_s:g} s: {error}",
        "--ready-check-timeout-sec",
    )


async def _ask_model(options: BenchServeOptions) -> str:
    try:
        return await first_model(options.models_url, _headers(options))
    except LookupError as error:
        raise ConfigError(f"{error}; name the model, or check --base-url", "--model") from error


def _report(
    options: BenchServeOptions, plan: RunPlan, measured: Measured, summary: Summary, provenance: Provenance
) -> None:
    setting, run = plan.setting, measured.run
    observations = _observations(plan, measured, is_scheduled=options.has_schedule)
    warnings = [
        *_warnings(options, setting, run.records, summary),
        *length_notes(options, plan.items, run.records),
    ]
    for line in (*failure_lines(run.records), *warnings, *_observed(observations)):
        print(line, file=sys.stderr)
    print(serving_table(options, setting, summary, observations), flush=True)
    if summary.by_tenant:
        print(tenant_table(summary), flush=True)
    if options.save_result or options.append_result:
        path = result_path(options, setting, run.started_at)
        result = result_object(options, setting, run, summary, provenance, observations)
        try:
            write_result(result, path, append=options.append_result)
            print(f"result written to {path}", file=sys.stderr)
            if options.save_detailed:
                where = write_requests(run.records, path, append=options.append_result)
                print(f"requests written to {where}", file=sys.stderr)
        except OSError as error:  # it could be written before the load: a full disk, say
            raise ConfigError(f"cannot write {path}: {error.strerror}", "--save-result") from error


def _observations(plan: RunPlan, measured: Measured, *, is_scheduled: bool) -> Observations:
    """Nothing can be sent in the one instant at which an infinite rate makes everything due."""
    checks = check_client(measured.run.records, measured.run.generator, is_open_loop=is_scheduled)
    samples = measured.server_samples
    if plan.setting.prefix_hit_share is not None and samples:
        checks.append(check_prefix_hits(plan.setting.prefix_hit_share, samples[0], samples[-1]))
    return Observations(checks, samples, measured.server_problem)


def _observed(observations: Observations) -> list[str]:
    """What the figures must not be read without."""
    lines = [
        f"CLIENT-BOUND: {reason}; latencies and rates are the generator's, not the server's."
        for reason in client_bound_reasons(observations.validity)
    ]
    lines += [
        f"WARNING: broken condition: {reason}." for reason in other_broken_reasons(observations.validity)
    ]
    if observations.server_problem is not None:
        lines.append(f"note: no server metrics: {observations.server_problem}")
    elif observations.server_samples and (missing := not_reported(observations.server_samples)):
        lines.append(f"note: the server does not report: {', '.join(missing)}")
    return lines


def _warnings(
    options: BenchServeOptions, setting: RunSetting, records: Sequence[RequestRecord], summary: Summary
) -> list[str]:
    """What makes the figures mean something else than they seem to."""
    warnings = []
    good = [record for record in records if record.succeeded]
    if any(record.num_output_tokens is None for record in good):
        warnings.append("WARNING: the server reports no usage; figures that need token counts are left out.")
    if summary.num_other_lengths and options.ignores_eos:
        warnings.append(
            f"WARNING: {summary.num_other_lengths} answers are not as long as asked; "
            "does the server ignore eos?"
        )
    if summary.num_odd_usages:
        warnings.append(
            f"WARNING: the usage of {summary.num_odd_usages} answers cannot be right: "
            "above max_tokens, or fewer tokens than chunks."
        )
    if setting.num_distinct_prompts < setting.num_prompts:
        warnings.append("WARNING: prompts repeat; a prefix cache makes the repeated ones cheap.")
    if summary.total_cached_tokens and setting.prefix_hit_share == 0:
        warnings.append(f"note: {summary.total_cached_tokens} prompt tokens came from the prefix cache.")
    return warnings


def length_notes(
    options: BenchServeOptions, items: Sequence[Item], records: Sequence[RequestRecord]
) -> list[str]:
    """Prompts of words are as long as asked only for a tokenizer that has those words whole."""
    if options.dataset_name not in SYNTHETIC_NAMES:
        return []
    asked = [num_words for item in items if (num_words := num_first_words(item)) is not None]
    told = [
        record.num_prompt_tokens
        for record in records
        if record.turn == 0 and record.succeeded and record.num_prompt_tokens is not None
    ]
    if not asked or not told:
        return []
    words, tokens = sum(asked) / len(asked), sum(told) / len(told)
    if words / WORD_LENGTH_TOLERANCE <= tokens <= words * WORD_LENGTH_TOLERANCE:
        return []
    what = "the first turn of a conversation" if records[0].conversation is not None else "a prompt"
    return [
        f"note: the server counts {tokens:.0f} tokens for {what} on average, where {words:.0f} were asked: "
        "text is made of as many words, and its tokenizer does not take each as one token."
    ]


def _target(options: BenchServeOptions, model: str) -> Target:
    return Target(
        url=options.url,
        backend=options.backend,
        model=model,
        headers=_headers(options),
        sampling=options.sampling,
        ignore_eos=options.ignores_eos,
        timeout_s=options.request_timeout_s,
        is_streaming=options.streaming,
        asks_continuous_usage=options.continuous_usage,
        trace_share=options.trace_sample_share,
        request_id_prefix=options.request_id_prefix,
        verifies_tls=not options.insecure,
    )


def _headers(options: BenchServeOptions) -> dict[str, str]:
    return options.authorization_headers


def _announcement(options: BenchServeOptions, plan: RunPlan) -> str:
    setting = plan.setting
    if isinstance(plan.schedule, ClosedLoop):
        load = f"closed loop, concurrency {setting.max_concurrency}"
    else:
        load = f"open loop, {_pace(options)}"
        if setting.max_concurrency is not None:
            load += f", at most {setting.max_concurrency} at once"
    return f"{setting.num_prompts} requests to {options.url}, model {setting.model}: {load}"


def _pace(options: BenchServeOptions) -> str:
    if options.is_self_timed:
        return f"times of the trace, scaled by {options.trace_time_scale:g}"
    if options.ramp_up_strategy is not None:
        start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
        return f"{start:g} to {end:g} req/s, {options.ramp_up_strategy}, burstiness {options.burstiness:g}"
    return f"{options.request_rate:g} req/s, burstiness {options.burstiness:g}"
