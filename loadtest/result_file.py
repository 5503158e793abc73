"""The result as JSON: the keys of `vllm bench serve`, and everything else under one key, `headrace`.

Statistics are in milliseconds and raw arrays in seconds, as in vLLM's files; our raw times are
integer nanoseconds. What is not known is null, what is infinite the string "inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.distribution import Distribution
from loadtest.generator import LoadRun
from loadtest.machine import Machine
from loadtest.options import METRIC_NAMES, BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.summary import Summary

FORMAT_VERSION = 1
TTFT_RULE = (
    "ttft: just before the POST to the first chunk with choices, as vLLM; "
    "ttft_content: the same to the first non-empty content; ttft_due: from the due time instead"
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


@dataclass(frozen=True, slots=True)
class Provenance:
    machine: Machine
    commit: str | None


def result_object(
    options: BenchServeOptions, setting: RunSetting, run: LoadRun, summary: Summary, provenance: Provenance
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": f"{run.started_at:%Y%m%d-%H%M%S}",
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": setting.model,
        "tokenizer_id": None,  # lengths are counted by the server
        "num_prompts": setting.num_prompts,
        **options.metadata,
        "request_rate": _json_number(options.request_rate),
        "burstiness": _json_number(options.burstiness),
        "max_concurrency": setting.max_concurrency,
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
    result["headrace"] = _headrace_object(options, setting, run, summary, provenance)
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


def write_result(result: Mapping[str, Any], path: Path, *, append: bool) -> None:
    """One JSON object; when appended, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        if append and file.tell() > 0:
            file.write("\n")
        json.dump(result, file, allow_nan=False)


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
    options: BenchServeOptions, setting: RunSetting, run: LoadRun, summary: Summary, provenance: Provenance
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
        "workload": {
            "dataset_name": options.dataset_name,
            "random_input_len": options.random_input_len,
            "random_output_len": options.random_output_len,
            "random_range_ratio": options.random_range_ratio,
            "random_prefix_len": options.random_prefix_len,
            "ignore_eos": options.ignores_eos,
            "temperature": options.temperature,
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
    for name in ("ttft_content_ms", "ttft_due_ms", "e2el_due_ms", "dispatch_lag_ms"):
        extras[name] = _distribution_object(getattr(summary, name))
    if options.save_detailed:
        extras["requests"] = [_request_object(record) for record in run.records]
    return extras


def is_closed_loop(options: BenchServeOptions, concurrency: int | None) -> bool:
    """An infinite rate with a limit is a closed loop; without one, everything is due at once."""
    return math.isinf(options.request_rate) and concurrency is not None


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
