"""Reads the trace formats that are passed around, and our own. Each becomes a list of `TraceRequest`,
in the order of time.

| name | file | fields |
|---|---|---|
| timed_trace | JSON lines (Mooncake) | timestamp (ms), input_length, output_length, hash_ids (512 tokens) |
| azure | CSV (AzurePublicDataset, 2023 and 2024) | TIMESTAMP, ContextTokens, GeneratedTokens |
| burstgpt | CSV | Timestamp (s), Request tokens, Response tokens |
| usage | `headrace usage --rows` as JSON, JSON lines or CSV | arrived_at, input_tokens, output_tokens, … |
| otel | OTLP as JSON, or JSON lines of the collector's file exporter | spans with gen_ai.usage.* |

Requests without a prompt or an answer (refused and failed ones) put no such load on a server and are
left out, and counted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.traces.trace_request import TraceRequest
from shared.errors import ConfigError

FLAG = "--dataset-path"
DEFAULT_TIMESTAMP_UNIT_S = 0.001  # of timed_trace: milliseconds
MAX_TOKENS = 100_000_000  # of a prompt or an answer; above, a file has something else in that place
MAX_TIME = 1e20  # in whatever unit; nanoseconds since 1970 are 2e18


@dataclass(frozen=True, slots=True)
class TraceForm:
    """Labels and units that some files of `timed_trace` have otherwise."""

    timestamp_unit_s: float = DEFAULT_TIMESTAMP_UNIT_S
    timestamp_label: str = "timestamp"
    input_length_label: str = "input_length"
    output_length_label: str = "output_length"
    hash_ids_label: str = "hash_ids"


def read_trace(
    path: Path, name: str, form: TraceForm | None = None, notes: list[str] | None = None
) -> list[TraceRequest]:
    """Raises ConfigError that names the line or record that cannot be understood.

    `notes` gets a sentence about requests that were left out, if there are any.
    """
    form = form or TraceForm()
    readers: Mapping[str, Callable[[str, TraceForm], Iterator[TraceRequest | None]]] = {
        "timed_trace": _timed_trace,
        "azure": _azure,
        "burstgpt": _burstgpt,
        "usage": _usage,
        "otel": _otel,
    }
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", FLAG) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}", FLAG) from error
    try:
        found = [request for request in readers[name](text, form) if request is not None]
    except _Unreadable as error:
        raise ConfigError(f"{path}: {error}", FLAG) from error
    usable = [one for one in found if one.num_input_tokens >= 1 and one.num_output_tokens >= 1]
    if not usable:
        raise ConfigError(f"{path} holds no requests with prompt and answer, as {name} has them", FLAG)
    if notes is not None and len(usable) < len(found):
        notes.append(
            f"{path}: {len(found) - len(usable)} of {len(found)} requests are left out: "
            "no token in the prompt or in the answer"
        )
    return sorted(usable, key=lambda request: request.at_s)


class _Unreadable(Exception):  # noqa: N818 - becomes a ConfigError
    pass


def _timed_trace(text: str, form: TraceForm) -> Iterator[TraceRequest]:
    for where, row in _json_lines(text):
        with_hashes = row.get(form.hash_ids_label) or []
        if not isinstance(with_hashes, list) or not all(isinstance(one, int) for one in with_hashes):
            raise _Unreadable(f"{where}: {form.hash_ids_label} is not a list of whole numbers")
        yield TraceRequest(
            at_s=_number(row, form.timestamp_label, where) * form.timestamp_unit_s,
            num_input_tokens=_whole(row, form.input_length_label, where),
            num_output_tokens=_whole(row, form.output_length_label, where),
            block_hashes=tuple(with_hashes),
        )


def _azure(text: str, form: TraceForm) -> Iterator[TraceRequest]:
    for where, row in _csv_rows(text):
        yield TraceRequest(
            at_s=_moment(row, "TIMESTAMP", where),
            num_input_tokens=_whole(row, "ContextTokens", where),
            num_output_tokens=_whole(row, "GeneratedTokens", where),
        )


def _burstgpt(text: str, form: TraceForm) -> Iterator[TraceRequest]:
    for where, row in _csv_rows(text):
        yield TraceRequest(
            at_s=_number(row, "Timestamp", where),
            num_input_tokens=_whole(row, "Request tokens", where),
            num_output_tokens=_whole(row, "Response tokens", where),
        )


def _usage(text: str, form: TraceForm) -> Iterator[TraceRequest | None]:
    """Copies for shadow variants are left out: the replayed split makes its own."""
    beginning = text.lstrip()[:1]
    if beginning == "[":
        rows: Iterable[tuple[str, Mapping[str, Any]]] = _json_list(text)
    elif beginning == "{":
        rows = _json_lines(text)
    else:
        rows = _csv_rows(text)
    for where, row in rows:
        is_shadow = str(row.get("is_shadow", "")).lower() in ("1", "true")
        yield (
            None
            if is_shadow
            else TraceRequest(
                at_s=_number(row, "arrived_at", where),
                num_input_tokens=_whole(row, "input_tokens", where, 0),
                num_output_tokens=_whole(row, "output_tokens", where, 0),
                num_shared_tokens=_whole(row, "cached_tokens", where, 0),
                tenant=str(row.get("tenant") or ""),
            )
        )


def _otel(text: str, form: TraceForm) -> Iterator[TraceRequest]:
    """Of each request the outermost span that tells token counts: gateways and engines both do."""
    spans: dict[str, Mapping[str, Any]] = {}
    places: dict[str, str] = {}
    documents = [("document", _json(text, "document"))] if _is_one_document(text) else _json_lines(text)
    number = 0
    for line, document in documents:
        for resource in _listed(document, "resourceSpans", "resource_spans"):
            for scope in _listed(resource, "scopeSpans", "scope_spans"):
                for span in _listed(scope, "spans"):
                    number += 1
                    where = f"{line}, span {number}"
                    span_id = str(_object(span, where).get("spanId", span.get("span_id", f"span {number}")))
                    spans[span_id], places[span_id] = span, where
    told = {
        span_id: counts
        for span_id, span in spans.items()
        if (counts := _token_counts(span, places[span_id])) is not None
    }
    for span_id, (num_input_tokens, num_output_tokens) in told.items():
        span = spans[span_id]
        if _has_ancestor_in(span, spans, told):
            continue
        where = places[span_id]
        begin_name = "startTimeUnixNano" if "startTimeUnixNano" in span else "start_time_unix_nano"
        attributes = _attributes(span, where)
        yield TraceRequest(
            at_s=_number(span, begin_name, where, 0) / 1e9,
            num_input_tokens=num_input_tokens,
            num_output_tokens=num_output_tokens,
            num_shared_tokens=_whole(attributes, "headrace.cached_tokens", where, 0),
            tenant=str(attributes.get("headrace.tenant", "")),
        )


def _has_ancestor_in(
    span: Mapping[str, Any], spans: Mapping[str, Mapping[str, Any]], among: Mapping[str, Any]
) -> bool:
    seen: set[str] = set()
    parent = str(span.get("parentSpanId", span.get("parent_span_id", "")))
    while parent in spans and parent not in seen:
        if parent in among:
            return True
        seen.add(parent)
        parent = str(spans[parent].get("parentSpanId", spans[parent].get("parent_span_id", "")))
    return False


def _token_counts(span: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    attributes = _attributes(span, where)
    counts = []
    for new, old in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
        name = next(
            (name for kind in (new, old) if attributes.get(name := f"gen_ai.usage.{kind}") is not None), None
        )
        if name is None:
            return None
        counts.append(_whole(attributes, name, where))
    return counts[0], counts[1]


def _attributes(span: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of OTLP's JSON form, where each value stands under the name of its type."""
    found = {}
    for number, attribute in enumerate(_listed(span, "attributes"), start=1):
        value = _object(attribute, f"{where}, attribute {number}").get("value") or {}
        _object(value, f"{where}, attribute {number}: its value")
        found[str(attribute.get("key"))] = next(iter(value.values()), None) if value else None
    return found


def _listed(parent: Any, *names: str) -> list[Any]:
    for name in names:
        if isinstance(parent, dict) and isinstance(parent.get(name), list):
            return list(parent[name])
    return []


def _is_one_document(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # which of them, the reading line by line will tell
        return False
    return True


def _json_lines(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            where = f"line {number}"
            yield where, _object(_json(line, where), where)


def _json_list(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, entry in enumerate(_json(text, "document"), start=1):
        where = f"entry {number}"
        yield where, _object(entry, where)


def _csv_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise _Unreadable(f"line {reader.reader.line_num}: {error}") from error
        if row is None:
            return
        yield f"line {reader.line_num}", {str(name).strip(): value for name, value in row.items()}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # also of an integer with more digits than Python reads
        raise _Unreadable(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise _Unreadable(f"{where}: nested too deep") from error


def _object(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise _Unreadable(f"{where} is not an object")
    return entry


def _number(row: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = row.get(name)
    if value in (None, "") and default is not None:
        return default
    try:
        number = float(value)  # type: ignore[arg-type]  # None and lists are what except is for
    except (TypeError, ValueError, OverflowError) as error:
        raise _Unreadable(f"{where}: {name!r} is {_short(value)}, not a number") from error
    if not abs(number) <= MAX_TIME:
        raise _Unreadable(f"{where}: {name!r} is {_short(value)}, not a number that can be")
    return number


def _whole(row: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    number = int(_number(row, name, where, default))
    if number > MAX_TOKENS:
        raise _Unreadable(f"{where}: {name!r} is {_short(row.get(name))}, more tokens than can be")
    return number


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _moment(row: Mapping[str, Any], name: str, where: str) -> float:
    """Of `2023-11-16 18:15:46.6805900`, with or without an offset; UTC without one."""
    value = row.get(name)
    try:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise _Unreadable(f"{where}: {name!r} is {_short(value)}, not a moment") from error
