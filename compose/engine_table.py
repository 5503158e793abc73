"""Engines as rows of a table."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import psutil
from rich.table import Column, Table

from compose.run_directory import StackRecord
from shared.identifiers import EngineEpoch, EngineId
from shared.redis_schema import EngineRecord


class EngineRow(msgspec.Struct, frozen=True):
    """One engine. None: not known, or not yet. The token counts are since the epoch began."""

    engine_id: EngineId
    model: str
    state: str  # "down": it should run but has no record
    epoch: EngineEpoch | None = None
    epoch_age_s: float | None = None  # only of engines on this machine
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None  # 0 to 1
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    max_num_seqs_now: int | None = None
    max_num_tokens_now: int | None = None
    decode_step_p95_ms: float | None = None
    meets_itl_target: bool | None = None  # None also without a target


def engine_rows(records: Sequence[EngineRecord], stack: StackRecord | None) -> list[EngineRow]:
    """The engines that Redis knows of, and those that the stack on this machine should have."""
    pids = stack.pids.engines if stack else {}
    rows = [_row(record, local=pids.get(record.engine_id) == record.pid) for record in records]
    known = {record.engine_id for record in records}
    missing = [engine_id for engine_id in stack.engine_ids if engine_id not in known] if stack else []
    rows += [EngineRow(engine_id, "", "down") for engine_id in missing]
    return sorted(rows, key=lambda row: row.engine_id)


def engine_table(rows: Sequence[EngineRow], stack: StackRecord | None) -> Table:
    has_target = any(row.meets_itl_target is not None for row in rows)
    table = Table(
        Column("engine", no_wrap=True, min_width=max((len(row.engine_id) for row in rows), default=0)),
        *(
            "model",
            "state",
            "running",
            "waiting",
            "KV use",
            "prompt tokens",
            "output tokens",
            "up for",
            *(("limits", "step p95") if has_target else ()),
        ),
        title=f"gateway {stack.url}" if stack else None,
        title_justify="left",
        caption=None if rows else "no engine is registered",
        box=None,
    )
    for row in rows:
        table.add_row(
            row.engine_id,
            row.model,
            row.state,
            _number(row.num_running),
            _number(row.num_waiting),
            "–" if row.kv_cache_usage is None else f"{row.kv_cache_usage:.0%}",
            _number(row.prompt_tokens),
            _number(row.generation_tokens),
            "–" if row.epoch_age_s is None else f"{row.epoch_age_s:,.0f} s",
            *((_limits(row), _step_time(row)) if has_target else ()),
        )
    return table


def _row(record: EngineRecord, *, local: bool) -> EngineRow:
    load = record.load
    used = 1 - load.num_free_blocks / load.num_blocks if load is not None and load.num_blocks else None
    return EngineRow(
        engine_id=record.engine_id,
        model=record.model,
        state=record.state,
        epoch=record.epoch,
        epoch_age_s=_age_s(record.pid) if local else None,
        num_running=load.num_running if load else None,
        num_waiting=load.num_waiting if load else None,
        kv_cache_usage=used,
        prompt_tokens=load.prompt_tokens if load else None,
        generation_tokens=load.generation_tokens if load else None,
        max_num_seqs_now=load.max_num_seqs_now if load else None,
        max_num_tokens_now=load.max_num_tokens_now if load else None,
        decode_step_p95_ms=load.decode_step_p95_ms if load else None,
        meets_itl_target=load.meets_itl_target if load else None,
    )


def _age_s(pid: int) -> float | None:
    try:
        return time.time() - float(psutil.Process(pid).create_time())
    except psutil.Error:  # it has just ended
        return None


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _limits(row: EngineRow) -> str:
    if row.meets_itl_target is None:
        return "–"
    return f"{_number(row.max_num_seqs_now)} seqs, {_number(row.max_num_tokens_now)} tokens"


def _step_time(row: EngineRow) -> str:
    if row.meets_itl_target is None or row.decode_step_p95_ms is None:
        return "–"
    return f"{row.decode_step_p95_ms:.0f} ms{'' if row.meets_itl_target else ', target missed'}"
