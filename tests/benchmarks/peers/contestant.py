"""Something that takes part: a program that serves one model through HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_TOKENS_CACHED = 32_768
"""Keys and values that each server may keep, where that can be said. It is enough for every case; without a
bound the peak of memory would tell how large a pool is by default, and not what serving takes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with. It writes into `folder`, which is its own and empty."""

    port: int
    folder: Path
    num_threads: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Contestant:
    """It is ready when its health route says so and `is_ready` holds; then it is asked for its `api_key`.

    `environment` comes on top of that of this process.
    """

    name: str
    family: str  # what `--peers` may name as a whole
    version: str  # for the report
    command: Callable[[Launch], Sequence[str]]
    health_path: str
    environment: Callable[[Launch], Mapping[str, str]] = field(default=lambda _: {})
    is_ready: Callable[[Launch], bool] = field(default=lambda _: True)
    api_key: Callable[[Launch], str | None] = field(default=lambda _: None)
    is_headrace: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that cannot take part, and what would change that."""

    family: str
    reason: str
