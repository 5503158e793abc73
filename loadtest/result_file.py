"""The result as JSON: the keys of `vllm bench serve`, and everything else under one key, `headrace`.

Statistics are in milliseconds and raw arrays in seconds, as in vLLM's files; our raw times are
integer nanoseconds. What is not known is null, what is infinite the string "inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.client_check import is_client_bound
from loadtest.distribution import Distribution, describe
from loadtest.generator import LoadRun
from loadtest.generator_samples import GeneratorSamples
from loadtest.machine import Machine
from loadtest.options import METRIC_NAMES, BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.server_metrics import ServerSample, not_reported, prefix_hit_share
from loadtest.summary import Summary, TenantSummary
from loadtest.validity import ValidityCheck
from shared.errors import ConfigError

FORMAT_VERSION = 1
TTFT_RULE = (
    "ttft: just before the POST to the first chunk with choices, as vLLM; "
    "ttft_content: the same to the first non-empty content; ttft_due: from the due time instead"
)
DISTRIBUTIONS = (
    "ttft_content_ms",
    "ttft_output_ms",
    "ttft_due_ms",
    "e2el_due_ms",
    "dispatch_lag_ms",
    "connect_ms",
    "chunk_tokens",
)
ARRAYS_OF_DETAILED = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "start_times",
    "generated_texts",
    "errors",
)


@dataclass(frozen=True, slots=True)
class RunSetting:
    """What one run was, beyond the options that all runs of a sweep share."""

    model: str
    max_concurrency: int | None
    num_prompts: int
    nonce: int
    num_distinct_prompts: int
    prefix_hit_share: float | None = None  # of the prompt tokens, as the workload declares
    arrival_cv: float | None = None  # of the gaps between due times, as they came out
    rps_changes: Sequence[
        tuple[int, int]
    ] = ()  # of a ramp: whole requests/s, and since when (ns after start)


@dataclass(frozen=True, slots=True)
class Observations:
    """What was seen besides the requests: of the server, and of the generator itself."""

    validity: Sequence[ValidityCheck] = ()
    server_samples: Sequence[ServerSample] = ()
    server_problem: str | None = None  # why there are no readings


@dataclass(frozen=True, slots=True)
class Provenance:
    machine: Machine
    commit: str | None


def result_object(
    options: BenchServeOptions,
    setting: RunSetting,
    run: LoadRun,
    summary: Summary,
    provenance: Provenance,
    observations: Observations | None = None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": f"{run.started_at:%Y%m%d-%H%M%S}",
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": setting.model,
        "tokenizer_id": options.tokenizer,  # counts nothing: the server does
        "num_prompts": setting.num_prompts,
        **options.metadata,
        "request_rate": _json_number(options.request_rate),
        "burstiness": _json_number(options.burstiness),
        "max_concurrency": setting.max_concurrency,
        **_ramp_keys(options, setting, run),
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        **_vllm_arrays(run.records),
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
        "rtfx": 0.0,  # of speech models only
    }
    for name in METRIC_NAMES:
        result |= _vllm_statistics(name, summary.metrics_ms[name])
    if not options.save_detailed:
        for name in ARRAYS_OF_DETAILED:
            del result[name]
    seen = observations or Observations()
    result["headrace"] = _headrace_object(options, setting, run, summary, provenance, seen)
    return result


def result_path(options: BenchServeOptions, setting: RunSetting, started_at: datetime) -> Path:
    """vLLM's name for the file. A name that was given gets the concurrency added in a sweep, unless
    the runs are appended to it."""
    if options.result_filename is None:
        concurrency = "" if setting.max_concurrency is None else f"-concurrency{setting.max_concurrency}"
        name = (
            f"{options.label or options.backend}-{options.request_rate}qps{concurrency}"
            f"-{setting.model.rsplit('/', 1)[-1]}-{started_at:%Y%m%d-%H%M%S}.json"
        )
    elif options.concurrency_sweep and not options.append_result:
        given = Path(options.result_filename)
        name = str(given.with_name(f"{given.stem}-concurrency{setting.max_concurrency}{given.suffix}"))
    else:
        name = options.result_filename
    return (options.result_dir or Path()) / name


def check_result_places(options: BenchServeOptions) -> None:
    """Raises ConfigError, before there is a load, if its results could not be written.

    Makes the folder; a file that is there already is left as it is.
    """
    if not (options.save_result or options.append_result):
        return
    model = options.served_model_name or options.model or "model"
    for concurrency in options.concurrency_levels:
        path = result_path(options, RunSetting(model, concurrency, 0, 0, 0), datetime.now())
        places = [path, requests_path(path)] if options.save_detailed else [path]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            flag = "--result-filename" if options.result_dir is None else "--result-dir"
            raise ConfigError(f"cannot make the folder {path.parent}: {_reason(error)}", flag) from error
        for place in places:
            try:
                is_new = not place.exists()
                place.open("ab").close()
                if is_new:
                    place.unlink()
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"cannot write {place}: {_reason(error)}", _flag_of_place(options)
                ) from error


def write_result(result: Mapping[str, Any], path: Path, *, append: bool) -> None:
    """One JSON object; when appended, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        if append and file.tell() > 0:
            file.write("\n")
        json.dump(result, file, allow_nan=False)


def requests_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.requests.jsonl")


def write_requests(records: Sequence[RequestRecord], path: Path, *, append: bool) -> Path:
    """Everything that is known of each request, one JSON object per line; beside the result file."""
    where = requests_path(path)
    encoder = msgspec.json.Encoder()
    with where.open("ab" if append else "wb") as file:
        file.write(encoder.encode_lines(records))
    return where


def _flag_of_place(options: BenchServeOptions) -> str:
    if options.result_filename is not None:
        return "--result-filename"
    return "--save-result" if options.result_dir is None else "--result-dir"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def percentile_name(share: float) -> str:
    return f"p{int(share) if share == int(share) else share}"


def _vllm_statistics(name: str, distribution: Distribution | None) -> dict[str, float | None]:
    if distribution is None:
        keys = (f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", f"p99_{name}_ms")
        return dict.fromkeys(keys)
    return {
        f"mean_{name}_ms": distribution.mean,
        f"median_{name}_ms": distribution.median,
        f"std_{name}_ms": distribution.std,
        **{f"{percentile_name(p)}_{name}_ms": value for p, value in distribution.percentiles.items()},
    }


def _vllm_arrays(records: list[RequestRecord]) -> dict[str, list[Any]]:
    """In the order of the prompts, failures included. Their times are 0.0, as in vLLM's files, whose
    readers calculate with them: `errors` tells them apart, and `headrace.requests` has null."""
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens if record.succeeded else 0 for record in records],
        "ttfts": [_seconds(record.ttft_ns) for record in records],
        "itls": [[_seconds(gap) for gap in record.itls_ns] for record in records],
        "latencies": [_seconds(record.e2el_ns) for record in records],
        "start_times": [_seconds(record.t_sent_ns) for record in records],
        "queue_times": [_seconds(record.dispatch_lag_ns) for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _headrace_object(
    options: BenchServeOptions,
    setting: RunSetting,
    run: LoadRun,
    summary: Summary,
    provenance: Provenance,
    observations: Observations,
) -> dict[str, Any]:
    extras: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "started_at": run.started_at.isoformat(),
        "t_start_ns": run.t_start_ns,
        "t_end_ns": run.t_end_ns,
        "loop": "closed" if is_closed_loop(options, setting.max_concurrency) else "open",
        "attempted": len(run.records),
        "failures": dict(summary.failures),
        "ttft_rule": TTFT_RULE,
        "total_cached_tokens": summary.total_cached_tokens,
        "tokens_per_chunk": summary.tokens_per_chunk,
        "delivered_request_rate": summary.delivered_request_rate,
        "mean_concurrency": summary.mean_concurrency,
        "arrival_cv": setting.arrival_cv,
        "num_workers": len(run.generator),
        "client_bound": is_client_bound(observations.validity),
        "validity": [msgspec.to_builtins(check) for check in observations.validity],
        "percentiles_of_few_samples": few_samples(options.metric_percentiles, summary.completed),
        "usage": {
            "num_other_lengths": summary.num_other_lengths,
            "num_odd": summary.num_odd_usages,
            "total_output_tokens_asked": sum(record.num_output_tokens_asked for record in run.records),
        },
        "num_new_connections": summary.num_new_connections,
        "generator": [_generator_object(samples) for samples in run.generator],
        "server": _server_object(observations, run.records),
        "workload": {
            "dataset_name": options.dataset_name,
            "random_input_len": options.random_input_len,
            "random_output_len": options.random_output_len,
            "random_range_ratio": options.random_range_ratio,
            "random_prefix_len": options.random_prefix_len,
            "ignore_eos": options.ignores_eos,
            "temperature": options.temperature,
            "random_input_cv": options.random_input_cv,
            "random_output_cv": options.random_output_cv,
            "dataset_path": None if options.dataset_path is None else options.dataset_path.name,
            "multi_turn": options.multi_turn or options.random_num_turns > 1,
            "think_time_s": options.think_time_s,
            "self_timed": options.is_self_timed,
            "trace_time_scale": options.trace_time_scale,
            "duration_s": options.duration_s,
            "streaming": options.streaming,
            "prefix_hit_share": setting.prefix_hit_share,
            "num_distinct_prompts": setting.num_distinct_prompts,
            "num_warmups": options.num_warmups,
            "seed": options.seed,
            "nonce": setting.nonce,
        },
        "goodput_ms": dict(options.goodput_ms) or None,
        "machine": asdict(provenance.machine),
        "commit": provenance.commit,
        "command": options.command_line,
    }
    for name in DISTRIBUTIONS:
        extras[name] = _distribution_object(getattr(summary, name))
    if summary.by_tenant:
        extras["tenants"] = {name: _tenant_object(tenant) for name, tenant in summary.by_tenant.items()}
    if options.save_detailed:
        extras["requests"] = [_request_object(record) for record in run.records]
    return extras


def is_closed_loop(options: BenchServeOptions, concurrency: int | None) -> bool:
    """No times and a limit are a closed loop; without a limit, everything is due at once."""
    return not options.has_schedule and concurrency is not None


def few_samples(shares: Sequence[float], count: int) -> list[float]:
    """The percentiles beyond which lie fewer than ten of `count` values: those are mostly luck."""
    return [share for share in shares if count * (1 - share / 100) < 10]


def _ramp_keys(options: BenchServeOptions, setting: RunSetting, run: LoadRun) -> dict[str, Any]:
    if options.ramp_up_strategy is None:
        return {}
    moments = (
        (rps, run.started_at + timedelta(microseconds=offset_ns / 1000))
        for rps, offset_ns in setting.rps_changes
    )
    return {
        "ramp_up_strategy": options.ramp_up_strategy,
        "ramp_up_start_rps": options.ramp_up_start_rps,
        "ramp_up_end_rps": options.ramp_up_end_rps,
        "rps_change_events": [{"rps": rps, "timestamp": moment.isoformat()} for rps, moment in moments],
    }


def _generator_object(samples: GeneratorSamples) -> dict[str, Any]:
    lags_ms = describe((lag / 1e6 for lag in samples.loop_lags_ns), (50.0, 99.0, 100.0))
    return {
        "worker": samples.worker,
        "cpu_share": samples.cpu_share,
        "loop_lag_ms": _distribution_object(lags_ms),
        "collector_pauses_ms": [pause.duration_ns / 1e6 for pause in samples.collector_pauses],
    }


def _server_object(observations: Observations, records: Sequence[RequestRecord]) -> dict[str, Any]:
    samples = observations.server_samples
    has_usage = all(record.num_output_tokens is not None for record in records if record.succeeded)
    return {
        "problem": observations.server_problem,
        "not_reported": ([] if has_usage else ["usage"]) + not_reported(samples),
        "prefix_hit_share": prefix_hit_share(samples[0], samples[-1]) if samples else None,
        "samples": [msgspec.to_builtins(sample) for sample in samples],
    }


def _tenant_object(tenant: TenantSummary) -> dict[str, Any]:
    return {
        "attempted": tenant.attempted,
        "failed": tenant.failed,
        "total_output_tokens": tenant.total_output_tokens,
        "ttft_due_ms": _distribution_object(tenant.ttft_due_ms),
        "tpot_ms": _distribution_object(tenant.tpot_ms),
        "e2el_due_ms": _distribution_object(tenant.e2el_due_ms),
    }


def _distribution_object(distribution: Distribution | None) -> dict[str, Any] | None:
    if distribution is None:
        return None
    return {
        "count": distribution.count,
        "mean": _json_number(distribution.mean),
        "std": _json_number(distribution.std),
        **{percentile_name(p): _json_number(value) for p, value in distribution.percentiles.items()},
    }


def _request_object(record: RequestRecord) -> dict[str, Any]:
    left_out = ("text", "error")  # generated_texts and errors hold them
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name not in left_out}


def _seconds(time_ns: int | None) -> float:
    return 0.0 if time_ns is None else time_ns / NANOSECONDS_PER_SECOND


def _json_number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value
