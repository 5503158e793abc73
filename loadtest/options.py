"""What `headrace bench serve` can be asked to do. Names and meanings are those of `vllm bench serve`.

Imports nothing heavy, so that the command line can be built from it quickly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from shared.errors import ConfigError

Backend = Literal["openai", "openai-chat"]
DatasetName = Literal["random", "custom"]

ENDPOINTS: Mapping[str, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASET_NAMES = ("random", "custom")
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
FIRST_RANDOM_TOKEN_ID = 1000  # below lie special tokens and single bytes in the usual vocabularies
DEFAULT_NUM_PROMPTS = 1000


@dataclass(frozen=True, slots=True)
class BenchServeOptions:
    """One call of `headrace bench serve`. Only `check()` validates; times are in the unit of the name."""

    backend: Backend = "openai"
    base_url: str | None = None  # wins over host and port
    host: str = "127.0.0.1"
    port: int = 8080
    endpoint: str | None = None  # None: the usual path of the backend
    model: str | None = None  # None: the first that /v1/models lists
    label: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    custom_output_len: int = 256  # for lines of the file that name none
    num_prompts: int | None = None  # None: 1000; in a sweep a number that fits the concurrency
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    random_vocab_size: int = 30_000
    ignore_eos: bool | None = None  # None: yes for random prompts, no for custom ones
    temperature: float | None = None  # None: not sent, the server decides
    seed: int = 0
    nonce: int | None = None  # None: drawn; the same seed and nonce give the same prompts

    max_concurrency: int | None = None
    concurrency_sweep: tuple[int, ...] = ()
    request_rate: float = math.inf
    burstiness: float = 1.0
    num_warmups: int = 0
    request_timeout_s: float = 6 * 3600.0

    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    metric_percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)

    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: Path | None = None
    result_filename: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    command_line: str | None = None  # as it should be recorded: without secrets

    @property
    def url(self) -> str:
        base = self.base_url or f"http://{bracketed(self.host)}:{self.port}"
        return base.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def models_url(self) -> str:
        base = self.base_url or f"http://{bracketed(self.host)}:{self.port}"
        return base.rstrip("/") + "/v1/models"

    @property
    def ignores_eos(self) -> bool:
        return self.dataset_name == "random" if self.ignore_eos is None else self.ignore_eos

    @property
    def concurrency_levels(self) -> tuple[int | None, ...]:
        """One run is made for each; None is no limit."""
        return self.concurrency_sweep or (self.max_concurrency,)

    def num_prompts_at(self, concurrency: int | None) -> int:
        if self.num_prompts is not None:
            return self.num_prompts
        if not self.concurrency_sweep or concurrency is None:
            return DEFAULT_NUM_PROMPTS
        if concurrency == 1:
            return 6  # alone on the server, answers differ little
        return max(2 * concurrency, min(64, 8 * concurrency))

    def check(self) -> None:
        """Raises ConfigError, naming the flag, unless a run is possible with these options."""
        self._check_target()
        self._check_workload()
        self._check_load()
        self._check_report()

    def _check_target(self) -> None:
        _one_of("--backend", self.backend, tuple(ENDPOINTS))
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is not an http URL", "--base-url")
        if not self.request_timeout_s > 0:
            raise ConfigError("must be above 0", "--request-timeout-s")

    def _check_workload(self) -> None:
        _one_of("--dataset-name", self.dataset_name, DATASET_NAMES)
        if (self.dataset_name == "custom") != (self.dataset_path is not None):
            raise ConfigError("goes with --dataset-name custom, and only with it", "--dataset-path")
        for flag, value, low in (
            ("--num-prompts", self.num_prompts, 1),
            ("--random-input-len", self.random_input_len, 1),
            ("--random-output-len", self.random_output_len, 1),
            ("--custom-output-len", self.custom_output_len, 1),
            ("--random-prefix-len", self.random_prefix_len, 0),
            ("--num-warmups", self.num_warmups, 0),
            ("--max-concurrency", self.max_concurrency, 1),
            ("--random-vocab-size", self.random_vocab_size, FIRST_RANDOM_TOKEN_ID + 2),
            ("--seed", self.seed, 0),
            ("--nonce", self.nonce, 0),
        ):
            if value is not None and value < low:
                raise ConfigError(f"must be at least {low}, got {value}", flag)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError("must be at least 0 and below 1", "--random-range-ratio")

    def _check_load(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"must be above 0, got {self.request_rate}", "--request-rate")
        if not self.burstiness > 0:
            raise ConfigError(f"must be above 0, got {self.burstiness}", "--burstiness")
        if any(level < 1 for level in self.concurrency_sweep):
            raise ConfigError("every level must be at least 1", "--concurrency-sweep")
        if self.concurrency_sweep and self.max_concurrency is not None:
            raise ConfigError("sets the concurrency of each run; leave it out", "--max-concurrency")

    def _check_report(self) -> None:
        for name in self.percentile_metrics:
            _one_of("--percentile-metrics", name, METRIC_NAMES)
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"{percentile:g} is not between 0 and 100", "--metric-percentiles")
        for name, limit_ms in self.goodput_ms.items():
            _one_of("--goodput", name, GOODPUT_NAMES)
            if not limit_ms >= 0:
                raise ConfigError(f"{name}:{limit_ms:g} must not be negative", "--goodput")


def bracketed(host: str) -> str:
    """An IPv6 address as URLs want it."""
    return f"[{host}]" if ":" in host else host


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{value!r} is not one of: {', '.join(allowed)}", flag)
