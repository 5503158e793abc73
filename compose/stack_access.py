"""How a command finds a stack: the environment first, then the run directory of a stack that is up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import redis

from compose.run_directory import CONFIG_FILE, StackRecord, read_secrets, read_stack
from compose.stack_config import ADMIN_TOKEN, KEY_PEPPER, REDIS_URL, read_config, redis_url
from shared.config import HeadraceConfig
from shared.errors import ConfigError
from shared.redis_client import connect
from shared.redis_schema import RedisKeys

API_KEY = "HEADRACE_API_KEY"  # of a client, for `chat` and `bench` against a stack without a run directory
REDIS_TIMEOUT_MS = 2000


@dataclass(frozen=True, slots=True)
class RedisAccess:
    url: str
    namespace: str

    def connect(self) -> redis.Redis:
        return connect(self.url, REDIS_TIMEOUT_MS)

    @property
    def keys(self) -> RedisKeys:
        return RedisKeys(self.namespace)


def redis_access(run_directory: Path, config_file: Path | None) -> RedisAccess:
    """Raises ConfigError when there is neither a Redis URL nor a stack that is up.

    A stack that is up is found also while the `headrace.toml` that it follows is not valid.
    """
    stack = read_stack(run_directory)
    try:
        config = read_config(config_file)
    except ConfigError:
        if stack is None or not _is_found_without_file(stack, config_file):
            raise
        return RedisAccess(stack.redis_url, stack.namespace)
    url = redis_url(config)
    if stack is not None and url in (None, stack.redis_url):
        return RedisAccess(stack.redis_url, stack.namespace)
    if url is None:
        raise ConfigError(no_stack(run_directory, "set HEADRACE_REDIS_URL"), "run-dir")
    return RedisAccess(url, config.redis.namespace)


def stack_config(run_directory: Path, config_file: Path | None) -> HeadraceConfig:
    """The file's; while `headrace.toml` is not valid, that which a stack that is up was started with.

    Raises ConfigError.
    """
    try:
        return read_config(config_file)
    except ConfigError:
        stack = read_stack(run_directory)
        if stack is None or not _is_found_without_file(stack, config_file):
            raise
        return read_config(run_directory / CONFIG_FILE)


def _is_found_without_file(stack: StackRecord, config_file: Path | None) -> bool:
    """Whether nobody has named a file, or the Redis of another stack."""
    return config_file is None and (os.environ.get(REDIS_URL) or stack.redis_url) == stack.redis_url


def key_pepper(run_directory: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Raises ConfigError when there is none: keys made with another one would never be accepted."""
    if value := environment.get(KEY_PEPPER):
        return value
    secrets = read_secrets(run_directory)
    if secrets is None:
        raise ConfigError(no_stack(run_directory, f"set {KEY_PEPPER}"), "run-dir")
    return secrets.pepper


def ready_stack(run_directory: Path) -> StackRecord:
    """Raises ConfigError when none is up there."""
    stack = read_stack(run_directory)
    if stack is None:
        raise ConfigError(no_stack(run_directory, "start one with `headrace up`"), "run-dir")
    return stack


@dataclass(frozen=True, slots=True)
class AdminApiAccess:
    url: str
    token: str


def admin_api_access(
    run_directory: Path, url: str | None, environment: Mapping[str, str] = os.environ
) -> AdminApiAccess:
    """`url`: of a stack elsewhere, whose token is in the environment, or in the run directory as in a
    gateway's container. Raises ConfigError."""
    if url is None:
        stack = read_stack(run_directory)
        if stack is None:
            raise ConfigError(no_stack(run_directory, "set HEADRACE_URL and HEADRACE_ADMIN_TOKEN"), "run-dir")
        return AdminApiAccess(stack.url, environment.get(ADMIN_TOKEN) or stack.admin_token)
    token = environment.get(ADMIN_TOKEN)
    if not token and (secrets := read_secrets(run_directory)) is not None:
        token = secrets.admin_token
    if not token:
        raise ConfigError(f"the environment variable {ADMIN_TOKEN} must be set", ADMIN_TOKEN)
    return AdminApiAccess(url.rstrip("/").removesuffix("/v1"), token)


def no_stack(run_directory: Path, otherwise: str) -> str:
    return f"no stack is up in {run_directory}; name its --run-dir, or {otherwise}"
