"""`headrace bench serve`: builds the workload, runs it once per concurrency, reports."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from loadtest.arrivals import arrival_offsets_ns
from loadtest.client import OpenAIClient, Target, first_model
from loadtest.console_table import failure_lines, serving_table, sweep_table
from loadtest.generator import ClosedLoop, LoadRun, OpenLoop, Schedule, generate_load
from loadtest.machine import checkout_commit, describe_machine
from loadtest.options import BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.result_file import (
    Provenance,
    RunSetting,
    is_closed_loop,
    result_object,
    result_path,
    write_result,
)
from loadtest.summary import Summary, summarise
from loadtest.workload import Prompt, RandomShape, custom_prompts, random_token_prompts, random_word_prompts
from shared.errors import ConfigError

EXIT_SUCCESS = 0
EXIT_REQUESTS_FAILED = 1

# Streams of random numbers that belong to one seed and nonce but must not repeat each other.
STREAM_MEASURED = 0
STREAM_WARMUP = 1
STREAM_ARRIVALS = 2


@dataclass(frozen=True, slots=True)
class RunPlan:
    setting: RunSetting
    prompts: Sequence[Prompt]
    warmup_prompts: Sequence[Prompt]
    schedule: Schedule


def run_bench_serve(options: BenchServeOptions) -> int:
    """Measures, prints, writes what was asked for; 0 if every request succeeded, else 1.

    Raises ConfigError for options that cannot work and for a server that names no model.
    """
    options.check()
    nonce = secrets.randbits(32) if options.nonce is None else options.nonce
    provenance = Provenance(describe_machine(), checkout_commit())
    rows: list[tuple[RunSetting, Summary]] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model = options.model or runner.run(_ask_model(options))
        for run_index, concurrency in enumerate(options.concurrency_levels):
            plan = plan_run(options, model, concurrency, nonce, run_index)
            print(_announcement(options, plan), file=sys.stderr, flush=True)
            run = runner.run(_measure(_target(options, model), plan))
            summary = summarise(run, options.metric_percentiles, options.goodput_ms)
            rows.append((plan.setting, summary))
            _report(options, plan.setting, run, summary, provenance)
    if options.concurrency_sweep:
        print(sweep_table(rows), flush=True)
    any_failed = any(summary.failed for _, summary in rows)
    return EXIT_REQUESTS_FAILED if any_failed else EXIT_SUCCESS


def plan_run(
    options: BenchServeOptions, model: str, concurrency: int | None, nonce: int, run_index: int
) -> RunPlan:
    """All that one run will do, fixed before its clock starts. Runs of a sweep share no prompts."""
    num_prompts = options.num_prompts_at(concurrency)
    prompts = _measured_prompts(options, num_prompts, (nonce, run_index, STREAM_MEASURED))
    if is_closed_loop(options, concurrency):
        assert concurrency is not None, "a closed loop has a concurrency"
        schedule: Schedule = ClosedLoop(concurrency)
    else:
        # From the seed alone: another nonce changes the words, not the load.
        rng = np.random.default_rng([options.seed, STREAM_ARRIVALS])
        offsets_ns = arrival_offsets_ns(num_prompts, options.request_rate, options.burstiness, rng)
        schedule = OpenLoop(offsets_ns, concurrency)
    num_distinct = len({_identity(prompt) for prompt in prompts})
    return RunPlan(
        setting=RunSetting(model, concurrency, num_prompts, nonce, num_distinct),
        prompts=prompts,
        warmup_prompts=_random_prompts(options, options.num_warmups, (nonce, run_index, STREAM_WARMUP)),
        schedule=schedule,
    )


async def _measure(target: Target, plan: RunPlan) -> LoadRun:
    async with OpenAIClient(target) as client:
        if plan.warmup_prompts:
            concurrency = plan.setting.max_concurrency or len(plan.warmup_prompts)
            warmup = await generate_load(plan.warmup_prompts, ClosedLoop(concurrency), client.send)
            for line in failure_lines(warmup.records):
                print(f"warm-up: {line}", file=sys.stderr)
        return await generate_load(plan.prompts, plan.schedule, client.send)


async def _ask_model(options: BenchServeOptions) -> str:
    try:
        return await first_model(options.models_url, _headers(options))
    except LookupError as error:
        raise ConfigError(f"{error}; name the model, or check --base-url", "--model") from error


def _report(
    options: BenchServeOptions,
    setting: RunSetting,
    run: LoadRun,
    summary: Summary,
    provenance: Provenance,
) -> None:
    for line in (*failure_lines(run.records), *_warnings(options, setting, run.records, summary)):
        print(line, file=sys.stderr)
    print(serving_table(options, setting, summary), flush=True)
    if options.save_result or options.append_result:
        path = result_path(options, setting, run.started_at)
        result = result_object(options, setting, run, summary, provenance)
        write_result(result, path, append=options.append_result)
        print(f"result written to {path}", file=sys.stderr)


def _warnings(
    options: BenchServeOptions, setting: RunSetting, records: Sequence[RequestRecord], summary: Summary
) -> list[str]:
    """What makes the figures mean something else than they seem to."""
    warnings = []
    good = [record for record in records if record.succeeded]
    if any(record.num_output_tokens is None for record in good):
        warnings.append("WARNING: the server reports no usage; figures that need token counts are left out.")
    num_short = sum(
        record.num_output_tokens is not None and record.num_output_tokens != record.num_output_tokens_asked
        for record in good
    )
    if num_short and options.ignores_eos:
        warnings.append(f"WARNING: {num_short} answers are not as long as asked; does the server ignore eos?")
    if setting.num_distinct_prompts < setting.num_prompts:
        warnings.append("WARNING: prompts repeat; a prefix cache makes the repeated ones cheap.")
    if summary.total_cached_tokens and not options.random_prefix_len and options.dataset_name == "random":
        warnings.append(f"note: {summary.total_cached_tokens} prompt tokens came from the prefix cache.")
    return warnings


def _measured_prompts(options: BenchServeOptions, num_prompts: int, nonce: Sequence[int]) -> list[Prompt]:
    if options.dataset_name == "random":
        return _random_prompts(options, num_prompts, nonce)
    assert options.dataset_path is not None, "check() wants a path for custom prompts"
    return custom_prompts(
        options.dataset_path,
        num_prompts,
        options.custom_output_len,
        takes_ids=options.backend == "openai",
    )


def _random_prompts(options: BenchServeOptions, num_prompts: int, nonce: Sequence[int]) -> list[Prompt]:
    shape = RandomShape(
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        vocab_size=options.random_vocab_size,
    )
    make = random_token_prompts if options.backend == "openai" else random_word_prompts
    return make(num_prompts, shape, options.seed, nonce)


def _target(options: BenchServeOptions, model: str) -> Target:
    sampling: Mapping[str, Any] = {} if options.temperature is None else {"temperature": options.temperature}
    return Target(
        url=options.url,
        backend=options.backend,
        model=model,
        headers=_headers(options),
        sampling=sampling,
        ignore_eos=options.ignores_eos,
        timeout_s=options.request_timeout_s,
    )


def _headers(options: BenchServeOptions) -> dict[str, str]:
    key = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    return {**key, **options.headers}


def _identity(prompt: Prompt) -> str | tuple[int, ...]:
    return prompt.content if isinstance(prompt.content, str) else tuple(prompt.content)


def _announcement(options: BenchServeOptions, plan: RunPlan) -> str:
    setting = plan.setting
    if isinstance(plan.schedule, ClosedLoop):
        load = f"closed loop, concurrency {setting.max_concurrency}"
    else:
        load = f"open loop, {options.request_rate:g} req/s, burstiness {options.burstiness:g}"
        if setting.max_concurrency is not None:
            load += f", at most {setting.max_concurrency} at once"
    return f"{setting.num_prompts} requests to {options.url}, model {setting.model}: {load}"
