"""What a server tells about itself at /metrics, while it is under load.

Read are Headrace's and vLLM's names, and those of SGLang and llama.cpp for the same ideas. A figure
that a server does not have is None: it is listed as not reported, never taken for 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from loadtest.server_url import basic_authorization, without_credentials
from loadtest.validity import ValidityCheck

if TYPE_CHECKING:
    import aiohttp

SCRAPE_TIMEOUT_S = 5.0
SAMPLE_INTERVAL_S = 1.0
PREFIX_HIT_TOLERANCE = 0.02  # of the share: two points


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. Gauges are of this moment; counters have run since the server began.

    Summed over the engines behind the address, but for `kv_usage`, which is that of the fullest.
    """

    at_s: float  # on the monotonic clock of this machine, or from the beginning of a probe
    running: float | None = None  # sequences in the batch
    waiting: float | None = None  # sequences not yet begun
    kv_usage: float | None = None  # 0 to 1
    generation_tokens: float | None = None  # counter
    prompt_tokens: float | None = None  # counter
    prefix_queries: float | None = None  # counter of tokens looked up in the prefix cache
    prefix_hits: float | None = None  # counter of tokens found there
    preemptions: float | None = None  # counter
    throttled: float | None = None  # counter of requests that a limit has refused

    def from_beginning(self, begin_s: float) -> ServerSample:
        """The same with the time counted from `begin_s`."""
        return msgspec.structs.replace(self, at_s=self.at_s - begin_s)


@dataclass(frozen=True, slots=True)
class Figure:
    """How one field is found: the first of `names` that the server has; counters without `_total`."""

    names: Sequence[str]
    is_highest: bool = False  # over the engines, instead of their sum


FIGURES: Mapping[str, Figure] = {
    "running": Figure(
        ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
    ),
    "waiting": Figure(("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")),
    "kv_usage": Figure(
        (
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",  # before vLLM 0.10
            "sglang:token_usage",
            "llamacpp:kv_cache_usage_ratio",
        ),
        is_highest=True,
    ),
    "generation_tokens": Figure(
        ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted")
    ),
    "prompt_tokens": Figure(("vllm:prompt_tokens", "sglang:prompt_tokens", "llamacpp:prompt_tokens")),
    "prefix_queries": Figure(
        ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries", "sglang:prompt_tokens")
    ),
    "prefix_hits": Figure(("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens")),
    "preemptions": Figure(("vllm:num_preemptions", "sglang:num_retracted_reqs")),
    "throttled": Figure(("headrace_limit_refusals",)),
}
_COUNTER_LINE = re.compile(rb"^# TYPE ([a-zA-Z_:][\w:]*) counter\s*$", re.MULTILINE)
_SAMPLE_LINE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


class ServerMetrics:
    """Reads one server's /metrics. `url` is that of the server, or of the page itself.

    Use it as `async with`; `sample()` never raises for a server that does not answer: load must not
    stop because a page is missing. `problem` then says why.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = metrics_url(without_credentials(url))
        self._headers = dict(headers or {})
        if (
            in_url := basic_authorization(url)
        ) is not None:  # its own, whatever the server's other pages want
            self._headers = {k: v for k, v in self._headers.items() if k.lower() != "authorization"}
            self._headers["Authorization"] = in_url
        self._session: aiohttp.ClientSession | None = None
        self.problem: str | None = None

    async def __aenter__(self) -> Self:
        import aiohttp  # local: the command line is built without it

        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def sample(self) -> ServerSample:
        """A reading of now: every field but the time is None if there is none."""
        import aiohttp  # local: see above

        assert self._session is not None, "the metrics are read outside their `async with`"
        try:
            async with self._session.get(self.url) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError too
            self.problem = f"{self.url}: {type(error).__name__}: {error}".rstrip(": ")
            return ServerSample(at_s=time.monotonic())
        at_s = time.monotonic()
        if response.status != 200:
            self.problem = f"{self.url} answers HTTP {response.status}"
            return ServerSample(at_s=at_s)
        self.problem = None
        return parse_metrics(body, at_s)


class ServerSampler:
    """Readings at an even pace, in the background. Ends, and reads once more, with its context."""

    def __init__(self, metrics: ServerMetrics, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self.samples: list[ServerSample] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[list[ServerSample]]:
        """The list that grows. The first reading is taken before the body runs, the last one after it."""
        self.samples.append(await self._metrics.sample())
        sampling = asyncio.create_task(self._sample_on())
        try:
            yield self.samples
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        self.samples.append(await self._metrics.sample())

    async def _sample_on(self) -> None:
        next_at_s = time.monotonic()
        while True:
            # Against the absolute time; a slow answer leaves readings out instead of moving the rest.
            next_at_s = max(next_at_s + self._interval_s, time.monotonic())
            await asyncio.sleep(next_at_s - time.monotonic())
            self.samples.append(await self._metrics.sample())


def metrics_url(url: str) -> str:
    """Of a server's root, its /v1 root, or the page's own URL."""
    base = url.rstrip("/")
    return base if base.endswith("/metrics") else base.removesuffix("/v1") + "/metrics"


def parse_metrics(page: bytes, at_s: float) -> ServerSample:
    """Prometheus' text format, of which only the wanted names are looked at.

    A counter that is announced, but has no line yet because nothing has happened, is 0. Otherwise a name
    without a value that is a number counts as absent, as do NaN and the infinities.
    """
    counters = (name.decode().removesuffix("_total") for name in _COUNTER_LINE.findall(page))
    values: dict[str, list[float]] = {name: [0.0] for name in counters}
    for name, text in _SAMPLE_LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if abs(value) < float("inf"):  # NaN is not smaller either
            values.setdefault(name.decode().removesuffix("_total"), []).append(value)
    found: dict[str, float] = {}
    for field, figure in FIGURES.items():
        for name in figure.names:
            if name in values:
                found[field] = max(values[name]) if figure.is_highest else sum(values[name])
                break
    return ServerSample(at_s=at_s, **found)


def not_reported(samples: Sequence[ServerSample]) -> list[str]:
    """The figures that no reading had."""
    return [name for name in FIGURES if all(getattr(sample, name) is None for sample in samples)]


def prefix_hit_share(before: ServerSample, after: ServerSample) -> float | None:
    """Of the tokens looked up between two readings, the share found in the cache; None: not told."""
    queries = _grown(before.prefix_queries, after.prefix_queries)
    hits = _grown(before.prefix_hits, after.prefix_hits)
    return None if queries is None or hits is None or queries == 0 else hits / queries


def check_prefix_hits(
    declared: float, before: ServerSample, after: ServerSample, tolerance: float = PREFIX_HIT_TOLERANCE
) -> ValidityCheck:
    """Whether the cache served what the workload says it would: otherwise another load was measured."""
    share = prefix_hit_share(before, after)
    if share is None:
        reason = f"the server does not report prefix cache hits; declared are {declared:.1%}"
        return ValidityCheck(
            check="prefix_hit_share", passed=True, value=None, limit=tolerance, reason=reason
        )
    passed = abs(share - declared) <= tolerance
    reason = f"{share:.1%} of the prompt tokens came from the prefix cache, declared are {declared:.1%}"
    if not passed:
        reason += f", more than {100 * tolerance:g} points apart"
    return ValidityCheck(check="prefix_hit_share", passed=passed, value=share, limit=tolerance, reason=reason)


def _grown(before: float | None, after: float | None) -> float | None:
    """None too where a counter fell: the server was started anew in between."""
    if before is None or after is None or after < before:
        return None
    return after - before
