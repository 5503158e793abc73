"""Which services make up a stack on one machine, and the command line and environment of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compose.run_directory import RunDirectory
from compose.service_process import ServiceSpec
from compose.stack_config import ADMIN_TOKEN, KEY_PEPPER, REDIS_URL
from compose.valkey import EmbeddedValkey
from shared.config import HeadraceConfig
from shared.identifiers import EngineId

GATEWAY = "gateway"
VALKEY = "valkey"
GATEWAY_END_MARGIN_S = 10.0  # beyond its drain time-out: last words, spans, slots
ENGINE_STOP_TIMEOUT_S = 10.0
VALKEY_STOP_TIMEOUT_S = 5.0
SECRET_VARIABLES = (REDIS_URL, KEY_PEPPER, ADMIN_TOKEN)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What an engine process fills; a restarted engine takes the same place in a new epoch."""

    engine_id: EngineId
    model: str
    index: int  # over all engines of the stack
    cpus: str | None  # to which it is kept


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The services of one stack. `redis_url` and the secrets go through the environment only."""

    config: HeadraceConfig
    run_directory: RunDirectory
    redis_url: str
    key_pepper: str
    admin_token: str
    followed_file: Path | None = None  # the user's own, of which `config` was made
    followed_model: str | None = None  # with this one as --model

    def places(self) -> list[EnginePlace]:
        numbered = [(model, number) for model in self.config.models for number in range(model.num_engines)]
        return [
            EnginePlace(
                EngineId(f"{model.name}-{number}"),
                model.name,
                index,
                None if model.cpus is None else model.cpus[number],
            )
            for index, (model, number) in enumerate(numbered)
        ]

    def engine(self, place: EnginePlace) -> ServiceSpec:
        command = headrace(
            "engine",
            "--config", str(self.run_directory.config_file),
            "--model", place.model,
            "--engine-id", place.engine_id,
            "--bind", f"ipc://{self.run_directory.socket_file(place.index)}",
            *(() if place.cpus is None else ("--cpus", place.cpus)),
        )  # fmt: skip
        environment = _environment({REDIS_URL: self.redis_url})
        return ServiceSpec(place.engine_id, command, environment, ENGINE_STOP_TIMEOUT_S)

    def gateway(self, port: int) -> ServiceSpec:
        command = headrace(
            "gateway",
            "--config", str(self.run_directory.config_file),
            "--port", str(port),
            "--ready-file", str(self.run_directory.gateway_ready_file),
            *(() if self.followed_file is None else ("--follow", str(self.followed_file))),
            *(() if self.followed_model is None else ("--follow-model", self.followed_model)),
        )  # fmt: skip
        environment = _environment(
            {REDIS_URL: self.redis_url, KEY_PEPPER: self.key_pepper, ADMIN_TOKEN: self.admin_token}
        )
        stop_timeout_s = self.config.gateway.drain_timeout_s + GATEWAY_END_MARGIN_S
        return ServiceSpec(GATEWAY, command, environment, stop_timeout_s)


def valkey_service(valkey: EmbeddedValkey) -> ServiceSpec:
    # Quiet: it greets every start with advice about kernel settings that matter to large servers.
    return ServiceSpec(VALKEY, valkey.command, _environment({}), VALKEY_STOP_TIMEOUT_S, is_quiet=True)


def headrace(*arguments: str) -> tuple[str, ...]:
    """The `headrace` command in this Python, wherever its script was installed."""
    return (sys.executable, "-m", "compose.cli", *arguments)


def _environment(secrets: Mapping[str, str]) -> dict[str, str]:
    """The supervisor's own environment with no secret in it but the given ones."""
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return inherited | {"PYTHONUNBUFFERED": "1"} | dict(secrets)
