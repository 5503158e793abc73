"""Reads results of `bench serve`: ours, and those of vLLM, which have the same keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.knee.probe import Probe, ProbedRequest
from shared.errors import ConfigError

NANOSECONDS = 1e9
VLLM_KEYS = ("request_rate", "completed", "request_throughput")
COUNT_KEYS = ("completed", "failed", "num_prompts")
NUMBER_KEYS = (*COUNT_KEYS, "request_throughput", "output_throughput", "burstiness")
PERCENTS = (50.0, 95.0, 99.0)
STATISTIC_KEYS = {50.0: "median_{name}_ms", 95.0: "p95_{name}_ms", 99.0: "p99_{name}_ms"}


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run. `probe` holds its requests if the file does, by `--save-detailed`."""

    path: Path
    values: Mapping[str, Any]  # the file's object
    probe: Probe | None
    counts_from_due: bool  # False: a file of another tool, which knows no due times

    @property
    def headrace(self) -> Mapping[str, Any]:
        extras = self.values.get("headrace")
        return extras if isinstance(extras, Mapping) else {}

    @property
    def rate(self) -> float:
        """Asked for, in requests per second; infinite: all at once, as fast as the limit lets them, or when
        a trace says."""
        return float(self.values["request_rate"])

    @property
    def is_replay(self) -> bool:
        """Of a trace, with its own times."""
        workload = self.headrace.get("workload")
        return isinstance(workload, Mapping) and workload.get("self_timed") is True

    @property
    def concurrency(self) -> int | None:
        limit = self.values.get("max_concurrency")
        return limit if isinstance(limit, int) else None

    @property
    def label(self) -> str:
        if self.is_replay:
            workload = self.headrace["workload"]
            scale = workload.get("trace_time_scale")
            scaled = (
                "" if scale == 1 or not isinstance(scale, int | float) else f", its times scaled by {scale:g}"
            )
            return f"replay of {workload.get('dataset_path') or workload.get('dataset_name')}{scaled}"
        if math.isfinite(self.rate):
            capped = f", at most {self.concurrency} at once" if self.concurrency is not None else ""
            return f"{self.rate:.4g}/s{capped}"
        return "all at once" if self.concurrency is None else f"{self.concurrency} at once"

    @property
    def num_failed(self) -> int:
        failed = self.values.get("failed")
        if isinstance(failed, int):
            return failed
        return max(0, int(self.values.get("num_prompts", 0)) - int(self.values["completed"]))

    @property
    def failed_share(self) -> float:
        attempted = int(self.values["completed"]) + self.num_failed
        return self.num_failed / attempted if attempted else 0.0

    def statistic_s(self, name: str, percent: float) -> float:
        """As the file says, of the answered requests; nan if it does not."""
        value = self.values.get(STATISTIC_KEYS[percent].format(name=name))
        return float(value) / 1000 if isinstance(value, int | float) else math.nan


def read_bench_file(path: Path) -> list[BenchRun]:
    """The runs of a file: one object, or one on each line. Raises ConfigError with what is wrong."""
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from error
    try:
        objects = [json.loads(content)]
    except ValueError:
        try:
            objects = [json.loads(line) for line in content.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
    if not objects:
        raise ConfigError(f"{path} is empty")
    return [_run(path, one) for one in objects]


def _run(path: Path, values: Any) -> BenchRun:
    missing = [key for key in VLLM_KEYS if not isinstance(values, dict) or key not in values]
    if missing:
        raise ConfigError(
            f"{path} is neither the result of `headrace knee` nor of `bench serve`: it has no {missing[0]!r}"
        )
    try:
        if not float(values["request_rate"]) > 0:
            raise ValueError(f"request_rate is {values['request_rate']!r}, not above 0")
        for key in NUMBER_KEYS:
            _check_number(values, key)
        extras = values.get("headrace")
        own = extras.get("requests") if isinstance(extras, dict) else None
        requests = _own_requests(own, values) if own else _vllm_requests(values)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a whole result of `bench serve`: {error!r}") from error
    return BenchRun(path, values, _probe(values, requests), bool(own))


def _check_number(values: Mapping[str, Any], key: str) -> None:
    """Raises TypeError or ValueError; what is missing or null is neither."""
    value = values.get(key)
    if value is None and key not in VLLM_KEYS:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} is {value!r}, not a number")
    if value < 0 or (key in COUNT_KEYS and not isinstance(value, int)):
        raise ValueError(f"{key} is {value!r}")


def _own_requests(rows: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> list[ProbedRequest]:
    begin_ns = min(row["t_due_ns"] for row in rows)
    errors = values.get("errors") or [""] * len(rows)

    def seconds(row: Mapping[str, Any], name: str) -> float | None:
        time_ns = row.get(name)
        return None if time_ns is None else (time_ns - begin_ns) / NANOSECONDS

    return [
        ProbedRequest(
            due_s=(row["t_due_ns"] - begin_ns) / NANOSECONDS,
            sent_s=seconds(row, "t_sent_ns"),
            first_token_s=seconds(row, "t_first_token_ns"),
            end_s=seconds(row, "t_end_ns"),
            num_prompt_tokens=row.get("num_prompt_tokens"),
            num_output_tokens=row.get("num_output_tokens"),
            failed=row.get("failure") is not None,
            error=f"{row['failure']}: {error}" if row.get("failure") is not None else "",
            trace_id=row.get("trace_id"),
            request_class=row.get("tenant") or "",
        )
        for row, error in zip(rows, errors, strict=True)
    ]


def _vllm_requests(values: Mapping[str, Any]) -> list[ProbedRequest]:
    """Without due times the times of sending have to do; 0.0 is vLLM's time of a failure."""
    names = ("start_times", "ttfts", "latencies", "errors", "input_lens", "output_lens")
    columns: list[list[Any]] = [values.get(name) or [] for name in names]
    if not all(columns):
        return []
    begin = min(columns[0])
    return [
        ProbedRequest(
            due_s=start - begin,
            sent_s=start - begin,
            first_token_s=None if error else start - begin + ttft,
            end_s=start - begin + latency,
            num_prompt_tokens=num_prompt,
            num_output_tokens=None if error else num_output,
            failed=bool(error) or latency == 0.0,
            error=error,
        )
        for start, ttft, latency, error, num_prompt, num_output in zip(*columns, strict=True)
    ]


def _probe(values: Mapping[str, Any], requests: list[ProbedRequest]) -> Probe | None:
    if not requests:
        return None
    rate = float(values["request_rate"])
    is_open = math.isfinite(rate)
    burstiness = float(values.get("burstiness") or 1.0)
    ends = [one.end_s for one in requests if one.end_s is not None]
    last_due = max(one.due_s for one in requests)
    return Probe(
        kind="open_loop" if is_open else "closed_loop",
        rate=rate if is_open else None,
        cv=burstiness**-0.5 if is_open else None,
        concurrency=values.get("max_concurrency"),
        begin_s=0.0,
        end_s=math.nextafter(last_due, math.inf),  # the last one belongs to it
        drained_s=max([*ends, last_due]),
        requests=requests,
    )
