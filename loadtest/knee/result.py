"""The result of a search, as `--json` writes it and reports read it.

A file is one object with one key, "headrace". Requests are stored in columns, which keeps a search with
some ten thousand of them in a few megabytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.validity import ValidityCheck
from shared.errors import ConfigError

FORMAT_VERSION = 1
KIND = "knee"
STORED_DECIMALS = 6  # microseconds: finer than any event loop

Status = Literal["resolved", "unresolved", "infeasible", "client_bound", "invalid"]
BoundaryType = Literal["smooth", "cliff", "unknown"]


class SloRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A promise: this share of all requests within all of these limits."""

    name: str
    attainment: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


class SloCapacity(msgspec.Struct, kw_only=True):
    """The largest rate that keeps the promise in the long run, and its 90 % interval."""

    rate: float  # requests/s
    ci90: tuple[float, float]
    method: str  # "plain", "queue_twin" or "step_twin"
    n_eff: float | None  # independent requests that the measured ones were worth
    design_effect: float | None  # measured requests per independent one


class CurvePoint(msgspec.Struct, kw_only=True):
    """The fitted share of good requests at one rate, with its 90 % interval."""

    rate: float
    attainment: float
    low: float
    high: float


class Breach(msgspec.Struct, kw_only=True):
    """The lowest rate whose probe clearly broke the promise."""

    rate: float
    constraint: str  # "ttft", "tpot", "e2el" or "failures"
    attainment: float


class TierResult(msgspec.Struct, kw_only=True):
    """The verdict on one SLO under one arrival law."""

    name: str
    slo: SloRow
    arrival_cv: float
    slo_capacity: SloCapacity | None
    feasible_max: float | None  # highest probed rate that clearly kept the promise
    infeasible_min: float | None  # lowest probed rate that clearly broke it
    first_breach: Breach | None
    binding_constraint: str | None  # "ttft", "tpot", "e2el", "failures"; None: nothing was ever broken
    boundary_type: BoundaryType
    status: Status
    validated: bool  # by a pair of probes that were kept out of the fit
    reasons: list[str] = []
    knee_fraction: float | None = None  # slo_capacity.rate / saturation_rate
    twin_correlation: float | None = None  # of measured and modelled blocks, for the twin that was best
    curve: list[CurvePoint] = []
    open_side: Literal["above", "below"] | None = None  # nothing bounds the capacity there: no point is known


class ShapeKnee(msgspec.Struct, kw_only=True):
    """Where latency turns up, without an SLO. Not a capacity: it promises nothing."""

    rate: float
    definition: str


class Phase(msgspec.Struct, kw_only=True):
    """What the search spent its time on."""

    name: str
    seconds: float


class KneeResult(msgspec.Struct, kw_only=True):
    """All of a search. `slo_capacity`, `arrival_cv` and `knee_fraction` are those of the first tier."""

    format_version: int = FORMAT_VERSION
    kind: Literal["knee"] = "knee"
    commit: str | None
    machine: dict[str, Any]
    started_at: str  # ISO 8601 with its zone
    command: str  # without secrets
    url: str
    model: str
    workload: dict[str, Any]
    slo: list[SloRow]
    slo_capacity: SloCapacity | None
    tiers: list[TierResult]
    shape_knee: ShapeKnee | None
    saturation_rate: float | None
    knee_fraction: float | None
    arrival_cv: float
    status: Status
    reasons: list[str]
    validity: list[ValidityCheck]
    not_reported_by_server: list[str]
    phases: list[Phase]
    seconds_spent: float
    budget_s: float
    saturation_ci90: tuple[float, float] | None = None
    probes: list[Probe] = []


def encode_result(result: KneeResult) -> bytes:
    """The bytes of a result file."""
    document = msgspec.to_builtins(result)
    for probe in document["probes"]:
        probe["requests"] = _columns(probe["requests"])
    return msgspec.json.encode({"headrace": document})


def decode_result(data: bytes) -> KneeResult:
    """Raises msgspec.ValidationError or msgspec.DecodeError with the place of what is wrong."""
    document = msgspec.json.decode(data, type=dict[str, Any]).get("headrace")
    if not isinstance(document, dict):
        raise msgspec.ValidationError("Object missing required field `headrace`")
    if document.get("kind") != KIND:
        raise msgspec.ValidationError(f"`headrace.kind` is {document.get('kind')!r}, not {KIND!r}")
    if document.get("format_version") != FORMAT_VERSION:
        raise msgspec.ValidationError(
            f"`headrace.format_version` is {document.get('format_version')!r}; "
            f"this version reads {FORMAT_VERSION}"
        )
    probes = document.get("probes", [])
    for probe in probes if isinstance(probes, list) else ():
        if isinstance(probe, dict):
            probe["requests"] = _rows(probe.get("requests", {}))
    return msgspec.convert(document, KneeResult)


def write_result(result: KneeResult, path: Path) -> None:
    """Raises ConfigError that names `--json` if the file cannot be written."""
    try:
        path.write_bytes(encode_result(result))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "--json") from error


def read_result(path: Path) -> KneeResult:
    """Raises ConfigError that names the file and what is wrong with it."""
    try:
        return decode_result(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the result of `headrace knee`: {error}") from error


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [_stored(row.get(name)) for row in rows] for name in ProbedRequest.__struct_fields__}


def _rows(columns: Any) -> list[dict[str, Any]]:
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        raise msgspec.ValidationError("`probes[].requests` is not an object of columns")
    if len({len(column) for column in columns.values()}) > 1:
        raise msgspec.ValidationError("the columns of `probes[].requests` differ in length")
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _stored(value: Any) -> Any:
    return round(value, STORED_DECIMALS) if isinstance(value, float) else value
