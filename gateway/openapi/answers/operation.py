"""Probes, and the administrator's routes."""

from __future__ import annotations

from typing import Literal

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class Readiness(TypedDict):
    ready: bool
    models_without_engine: list[str]


@with_config(CLOSED)
class Health(TypedDict):
    healthy: bool
    engines: list[str]
    stalled: list[str]


@with_config(CLOSED)
class EngineLoadAnswer(TypedDict):
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    outstanding_tokens: int
    num_steps: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    max_num_seqs_now: int
    max_num_tokens_now: int
    decode_step_p95_ms: float
    meets_itl_target: bool | None


@with_config(CLOSED)
class EngineState(TypedDict):
    engine_id: str
    epoch: str
    model: str
    state: Literal["connecting", "ready", "draining", "lost"]
    in_flight: int
    outstanding_tokens: int
    load: EngineLoadAnswer | None


@with_config(CLOSED)
class ConfigurationState(TypedDict):
    path: str | None
    error: str | None
    loaded_at: float | None


@with_config(CLOSED)
class AdminStatus(TypedDict):
    policy_version: int
    tenants: list[str]
    routes: list[str]
    draining: bool
    configuration: ConfigurationState
    engines: list[EngineState]


@with_config(CLOSED)
class ResetAnswer(TypedDict):
    engines_told: int
