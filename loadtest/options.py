"""What `headrace bench serve` can be asked to do. Names and meanings are those of `vllm bench serve`.

Imports nothing heavy, so that the command line can be built from it quickly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loadtest.server_url import basic_authorization, check_server_url, without_credentials
from shared.errors import ConfigError

Backend = Literal["openai", "openai-chat"]
DatasetName = Literal[
    "random",
    "custom",
    "sharegpt",
    "prefix_repetition",
    "txt-slices",
    "timed_trace",
    "azure",
    "burstgpt",
    "usage",
    "otel",
]
RampStrategyName = Literal["linear", "exponential"]

ENDPOINTS: Mapping[str, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
TRACE_NAMES = ("timed_trace", "azure", "burstgpt", "usage", "otel")
DATASET_NAMES = ("random", "custom", "sharegpt", "prefix_repetition", "txt-slices", *TRACE_NAMES)
NAMES_WITHOUT_PATH = ("random", "prefix_repetition", "sharegpt")  # sharegpt: from a package
SYNTHETIC_NAMES = ("random", "prefix_repetition", *TRACE_NAMES)  # whose answers are as long as asked
RAMP_STRATEGIES = ("linear", "exponential")
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
FIRST_RANDOM_TOKEN_ID = 1000  # below lie special tokens and single bytes in the usual vocabularies
DEFAULT_NUM_PROMPTS = 1000
WORKERS_PER_CORE = 4  # more processes that make the load only wait for each other


@dataclass(frozen=True, slots=True)
class BenchServeOptions:
    """One call of `headrace bench serve`. Only `check()` validates; times are in the unit of the name."""

    backend: Backend = "openai"
    base_url: str | None = field(default=None, repr=False)  # wins over host and port; may hold a password
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
    sharegpt_output_len: int | None = None  # None: as long as in the file
    num_prompts: int | None = None  # None: 1000, or all of a trace; in a sweep what fits the concurrency
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    random_vocab_size: int = 30_000
    random_input_cv: float | None = None  # lognormal lengths with this coefficient of variation
    random_output_cv: float | None = None
    random_num_turns: int = 1  # of conversations
    max_input_len: int | None = None  # longer ones of random lengths and traces are cut to it
    max_output_len: int | None = None
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    multi_turn: bool = False
    max_turns: int = 10
    think_time_s: float = 0.0  # on average, between an answer and the next turn
    disable_shuffle: bool = False
    no_oversample: bool = False
    nonce_prefix: bool = False
    prefix_hit_share: float | None = None  # declared; None: what the data set implies
    tenants: Path | None = None

    self_timed: bool | None = None  # None: for all traces but burstgpt, as vLLM
    trace_time_scale: float = 1.0
    trace_start_s: float = 0.0
    timed_trace_sec_multiplier: float = 0.001
    timed_trace_chunk_hash_size: int = 512
    timed_trace_label_timestamp: str = "timestamp"
    timed_trace_label_input_length: str = "input_length"
    timed_trace_label_output_length: str = "output_length"
    timed_trace_label_hash_ids: str = "hash_ids"

    ignore_eos: bool | None = None  # None: yes for synthetic prompts, no for text
    temperature: float | None = None  # None: not sent, the server decides
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = True
    continuous_usage: bool = False
    request_id_prefix: str | None = None
    trace_sample_share: float = 0.01  # of the requests, whose traces are asked to be kept
    insecure: bool = False
    seed: int = 0
    nonce: int | None = None  # None: drawn; the same seed and nonce give the same prompts

    max_concurrency: int | None = None
    concurrency_sweep: tuple[int, ...] = ()
    request_rate: float = math.inf
    burstiness: float = 1.0
    duration_s: float | None = None  # requests are due for so long, instead of --num-prompts of them
    ramp_up_strategy: RampStrategyName | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    num_warmups: int = 0
    num_workers: int = 1
    ready_check_timeout_s: float = 0.0
    scrapes_metrics: bool = True
    metrics_url: str | None = None
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
    tokenizer: str | None = None  # recorded only: the server counts
    served_model_name: str | None = None  # sent instead of `model`
    command_line: str | None = None  # as it should be recorded: without secrets

    @property
    def url(self) -> str:
        return self._base.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def models_url(self) -> str:
        return self._base.rstrip("/") + "/v1/models"

    @property
    def _base(self) -> str:
        """Without the credentials that a URL may hold: it is shown and recorded."""
        return without_credentials(self._given_base)

    @property
    def _given_base(self) -> str:
        return self.base_url or f"http://{bracketed(self.host)}:{self.port}"

    @property
    def authorization_headers(self) -> dict[str, str]:
        """Of every request: the key, or what the URL's credentials come to, and the headers asked for."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        in_url = basic_authorization(self._given_base)
        if in_url is not None:
            key = {"Authorization": in_url}
        return {**key, **self.headers}

    @property
    def ignores_eos(self) -> bool:
        return self.dataset_name in SYNTHETIC_NAMES if self.ignore_eos is None else self.ignore_eos

    @property
    def is_self_timed(self) -> bool:
        if self.dataset_name not in TRACE_NAMES:
            return False
        return self.dataset_name != "burstgpt" if self.self_timed is None else self.self_timed

    @property
    def has_schedule(self) -> bool:
        """Requests are due at times of their own, and not all at once or when a client is free."""
        return self.is_self_timed or self.ramp_up_strategy is not None or not math.isinf(self.request_rate)

    @property
    def metrics_page(self) -> str:
        return self.metrics_url or f"{self._base.rstrip('/')}/metrics"

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of the request's body that were asked for."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logprobs is not None:
            is_chat = self.backend == "openai-chat"
            fields |= (
                {"logprobs": True, "top_logprobs": self.logprobs} if is_chat else {"logprobs": self.logprobs}
            )
        return {**fields, **self.extra_body}

    @property
    def concurrency_levels(self) -> tuple[int | None, ...]:
        """One run is made for each; None is no limit."""
        return self.concurrency_sweep or (self.max_concurrency,)

    def num_prompts_at(self, concurrency: int | None) -> int | None:
        """None: as many as come within the duration, or are in the trace."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.duration_s is not None or self.dataset_name in TRACE_NAMES:
            return None
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
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"{self.endpoint!r} is not a path: it begins with /", "--endpoint")
        if self.base_url is None and not 1 <= self.port <= 65535:
            raise ConfigError(f"must be between 1 and 65535, got {self.port}", "--port")
        where = "--host" if self.base_url is None else "--base-url"
        check_server_url(self._given_base, where)
        check_server_url(self.url, "--endpoint")
        if self.metrics_url is not None:
            check_server_url(self.metrics_url, "--metrics-url")
        has_other = self.api_key is not None or any(name.lower() == "authorization" for name in self.headers)
        if basic_authorization(self._given_base) is not None and has_other:
            raise ConfigError(
                "holds credentials, and there is a key (OPENAI_API_KEY too) or an Authorization header; "
                "give one of them",
                where,
            )
        if not self.request_timeout_s > 0:
            raise ConfigError("must be above 0", "--request-timeout-s")

    def _check_workload(self) -> None:
        _one_of("--dataset-name", self.dataset_name, DATASET_NAMES)
        needs_path = self.dataset_name not in NAMES_WITHOUT_PATH
        takes_path = needs_path or self.dataset_name == "sharegpt"
        if (needs_path and self.dataset_path is None) or (not takes_path and self.dataset_path is not None):
            raise ConfigError(
                f"--dataset-name {self.dataset_name} {'needs a file' if needs_path else 'takes no file'}",
                "--dataset-path",
            )
        if self.self_timed and self.dataset_name not in TRACE_NAMES:
            raise ConfigError(
                f"{self.dataset_name} has no times; {', '.join(TRACE_NAMES)} do", "--self-timed"
            )
        whole: tuple[tuple[str, int | None, int], ...] = (
            ("--random-num-turns", self.random_num_turns, 1),
            ("--max-turns", self.max_turns, 2),
            ("--max-input-len", self.max_input_len, 1),
            ("--max-output-len", self.max_output_len, 1),
            ("--sharegpt-output-len", self.sharegpt_output_len, 1),
            ("--prefix-repetition-prefix-len", self.prefix_repetition_prefix_len, 1),
            ("--prefix-repetition-suffix-len", self.prefix_repetition_suffix_len, 1),
            ("--prefix-repetition-num-prefixes", self.prefix_repetition_num_prefixes, 1),
            ("--prefix-repetition-output-len", self.prefix_repetition_output_len, 1),
            ("--timed-trace-chunk-hash-size", self.timed_trace_chunk_hash_size, 1),
            ("--num-workers", self.num_workers, 1),
            ("--logprobs", self.logprobs, 0),
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
        )
        for flag, value, low in whole:
            if value is not None and value < low:
                raise ConfigError(f"must be at least {low}, got {value}", flag)
        for flag, number, is_right in (
            ("--random-input-cv", self.random_input_cv, _is_positive),
            ("--random-output-cv", self.random_output_cv, _is_positive),
            ("--think-time-s", self.think_time_s, _is_not_negative),
            ("--trace-time-scale", self.trace_time_scale, _is_positive),
            ("--trace-start-s", self.trace_start_s, _is_not_negative),
            ("--timed-trace-sec-multiplier", self.timed_trace_sec_multiplier, _is_positive),
            ("--prefix-hit-share", self.prefix_hit_share, _is_share),
            ("--trace-sample-share", self.trace_sample_share, _is_share),
        ):
            if number is not None and not is_right(number):
                raise ConfigError(f"cannot be {number:g}", flag)
        most = WORKERS_PER_CORE * (os.cpu_count() or 1)
        if self.num_workers > most:
            raise ConfigError(
                f"at most {most} on this machine, {WORKERS_PER_CORE} for each core; got {self.num_workers}",
                "--num-workers",
            )
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError("must be at least 0 and below 1", "--random-range-ratio")

    def _check_load(self) -> None:
        self._check_ramp()
        if self.duration_s is not None:
            if not (_is_positive(self.duration_s) and self.has_schedule):
                raise ConfigError(
                    "must be above 0, and needs a finite --request-rate, a ramp or a trace", "--duration"
                )
            if self.num_prompts is not None and not self.is_self_timed:
                raise ConfigError("either that or --num-prompts", "--duration")
        if not self.request_rate > 0:
            raise ConfigError(f"must be above 0, got {self.request_rate}", "--request-rate")
        if not self.burstiness > 0:
            raise ConfigError(f"must be above 0, got {self.burstiness}", "--burstiness")
        if any(level < 1 for level in self.concurrency_sweep):
            raise ConfigError("every level must be at least 1", "--concurrency-sweep")
        if self.concurrency_sweep and self.max_concurrency is not None:
            raise ConfigError("sets the concurrency of each run; leave it out", "--max-concurrency")

    def _check_ramp(self) -> None:
        rates = {"--ramp-up-start-rps": self.ramp_up_start_rps, "--ramp-up-end-rps": self.ramp_up_end_rps}
        if self.ramp_up_strategy is None:
            for flag, rate in rates.items():
                if rate is not None:
                    raise ConfigError("needs --ramp-up-strategy", flag)
            return
        _one_of("--ramp-up-strategy", self.ramp_up_strategy, RAMP_STRATEGIES)
        for flag, rate in rates.items():
            if rate is None or not _is_positive(rate):
                raise ConfigError("a ramp needs a rate above 0 here", flag)
        if not math.isinf(self.request_rate):
            raise ConfigError("a ramp sets the rates; leave it out", "--request-rate")
        if self.is_self_timed:
            raise ConfigError("the trace has its own times; add --no-self-timed", "--ramp-up-strategy")

    def _check_report(self) -> None:
        if not self.percentile_metrics:
            raise ConfigError("names no metric", "--percentile-metrics")
        if self.label is not None and ("/" in self.label or "\0" in self.label):
            raise ConfigError("is the beginning of a file's name: without /", "--label")
        if self.result_filename is not None and (not self.result_filename or "\0" in self.result_filename):
            raise ConfigError(f"{self.result_filename!r} is no name of a file", "--result-filename")
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


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _is_not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def _is_share(value: float) -> bool:
    return 0 <= value <= 1
