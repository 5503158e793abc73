"""What /metrics shows. Engine figures carry vLLM's names, so that its dashboards and scalers work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.breaker import RedisBreaker
from gateway.cached_labels import CachedLabels
from gateway.engine_link import EngineLink, LinkState
from gateway.variant_metrics import VariantMetrics
from shared.messages import EngineLoad
from shared.metrics import (
    FIRST_EVENT_BUCKETS_S,
    INTER_TOKEN_BUCKETS_S,
    REQUEST_BUCKETS_S,
    TTFT_BUCKETS_S,
)

ENGINE_LABELS = ("model_name", "engine")


class GatewayMetrics:
    """Counters of one gateway, in a registry of their own. Labels only ever hold configured names."""

    def __init__(self, links: Callable[[], Iterable[EngineLink]], policy_version: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(links))
        self.http_requests = CachedLabels(
            Counter(
                "headrace_http_requests", "Answers by route template and status.",
                ("route", "method", "status"), registry=self._registry,
            )
        )  # fmt: skip
        self.requests_in_flight = Gauge(
            "headrace_requests_in_flight", "Requests for a model between arrival and last byte.",
            registry=self._registry,
        )  # fmt: skip
        self.variants = VariantMetrics(self._registry)
        self.auth_failures = Counter(
            "headrace_auth_failures", "Requests that were not let in, by reason.",
            ("reason",), registry=self._registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "headrace_fallbacks", "Requests that another variant took over before the first byte.",
            ("route", "from", "to"), registry=self._registry,
        )  # fmt: skip
        self.shadow_requests = Counter(
            "headrace_shadow_requests", "Copies for a shadow variant, by what became of them.",
            ("route", "variant", "outcome"), registry=self._registry,
        )  # fmt: skip
        self.admin_refusals = Counter(
            "headrace_admin_refusals", "Requests to /admin with a wrong token.", registry=self._registry,
        )  # fmt: skip
        self.config_reload_failed = Gauge(
            "headrace_config_reload_failed", "1 while the configuration file is not in force as it stands.",
            registry=self._registry,
        )  # fmt: skip
        self.usage_rows_dropped = Counter(
            "headrace_usage_rows_dropped", "Usage rows that were never written, by where to.",
            ("place",), registry=self._registry,
        )  # fmt: skip
        self.placements = CachedLabels(
            Counter(
                "headrace_placements", "Why requests went to the engine they went to.",
                ("model_name", "reason"), registry=self._registry,
            )
        )  # fmt: skip
        self.redis_available = Gauge(
            "headrace_redis_available", "1 while Redis can be asked, by what for; else 0.",
            ("purpose",), registry=self._registry,
        )  # fmt: skip
        self.live_gateways = Gauge(
            "headrace_live_gateways", "Gateways that live, this one included, as last heard from Redis.",
            registry=self._registry,
        )  # fmt: skip
        self.limit_refusals = Counter(
            "headrace_limit_refusals", "Requests that a limit has refused.",
            ("scope", "limit", "tenant"), registry=self._registry,
        )  # fmt: skip
        self.limit_shadow_refusals = Counter(
            "headrace_limit_shadow_refusals", "Requests that a limit in shadow mode would have refused.",
            ("scope", "limit", "tenant"), registry=self._registry,
        )  # fmt: skip
        self.success = CachedLabels(
            Counter(
                "vllm:request_success", "Finished choices, and answered requests for embeddings.",
                (*ENGINE_LABELS, "finished_reason"), registry=self._registry,
            )
        )  # fmt: skip
        self.time_to_first_token = CachedLabels(
            Histogram(
                "vllm:time_to_first_token_seconds", "From the arrival of a request to its first token.",
                ENGINE_LABELS, buckets=TTFT_BUCKETS_S, registry=self._registry,
            )
        )  # fmt: skip
        self.inter_token_latency = CachedLabels(
            Histogram(
                "vllm:inter_token_latency_seconds", "Between two updates of one request.",
                ENGINE_LABELS, buckets=INTER_TOKEN_BUCKETS_S, registry=self._registry,
            )
        )  # fmt: skip
        self.e2e_latency = CachedLabels(
            Histogram(
                "vllm:e2e_request_latency_seconds", "From the arrival of a request to its last token.",
                ENGINE_LABELS, buckets=REQUEST_BUCKETS_S, registry=self._registry,
            )
        )  # fmt: skip
        self.first_event_delay = Histogram(
            "headrace_first_event_delay_seconds",
            "From an engine's first message for a stream to its first event in the socket.",
            buckets=FIRST_EVENT_BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        version = Gauge(
            "headrace_policy_version", "Version of the tenants and routes in force.", registry=self._registry
        )
        version.set_function(policy_version)

    def follow_redis(self, breaker: RedisBreaker) -> None:
        self.redis_available.labels(breaker.purpose).set_function(lambda: not breaker.is_open)

    def of_answer(self, model: str, engine_id: str, arrived_at: float) -> AnswerFigures:
        return AnswerFigures(self, (model, engine_id), arrived_at)

    def embedded(self, model: str, engine_id: str, arrived_at: float) -> None:
        """A request for embeddings was answered; one that has no tokens to wait for in between."""
        self.success.labels(model, engine_id, "stop").inc()
        self.e2e_latency.labels(model, engine_id).observe(time.monotonic() - arrived_at)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class AnswerFigures:
    """Takes the times of one answer. Looks its series up once, not once per token."""

    def __init__(self, metrics: GatewayMetrics, labels: tuple[str, str], arrived_at: float) -> None:
        self._labels = labels
        self._success = metrics.success
        self._time_to_first_token = metrics.time_to_first_token.labels(*labels)
        self._inter_token_latency = metrics.inter_token_latency.labels(*labels)
        self._e2e_latency = metrics.e2e_latency.labels(*labels)
        self._arrived_at = arrived_at
        self._updated_at: float | None = None

    def updated(self, finish_reasons: Iterable[str]) -> float:
        """Tokens have come, now; some choices may have ended with them."""
        now = time.monotonic()
        if self._updated_at is None:
            self._time_to_first_token.observe(now - self._arrived_at)
        else:
            self._inter_token_latency.observe(now - self._updated_at)
        self._updated_at = now
        for reason in finish_reasons:
            self._success.labels(*self._labels, reason).inc()
        return now

    def ended(self) -> None:
        self._e2e_latency.observe(time.monotonic() - self._arrived_at)


class _EngineCollector(Collector):
    """Engine figures as last reported by the engines themselves. None: this engine has no such figure."""

    GAUGES: dict[str, tuple[str, Callable[[EngineLoad], float | None]]] = {  # noqa: RUF012 - a constant
        "vllm:num_requests_running": ("Sequences in the running batch.", lambda load: load.num_running),
        "vllm:num_requests_waiting": ("Sequences that wait.", lambda load: load.num_waiting),
        "vllm:kv_cache_usage_perc": (
            "Share of KV blocks in use, 0 to 1.",
            lambda load: 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
        ),
        "headrace_engine_outstanding_tokens": (
            "Tokens still to be computed for accepted requests.",
            lambda load: load.outstanding_tokens,
        ),
        "headrace_engine_max_num_seqs": (
            "Sequences that may run at once just now, see target_itl_ms.",
            lambda load: load.max_num_seqs_now or None,
        ),
        "headrace_engine_max_num_tokens": (
            "Tokens that the last step might have computed, see target_itl_ms.",
            lambda load: load.max_num_tokens_now or None,
        ),
        "headrace_engine_decode_step_p95_seconds": (
            "95th percentile of the last 100 steps in which somebody decoded.",
            lambda load: load.decode_step_p95_ms / 1e3 or None,
        ),
        "headrace_engine_meets_itl_target": (
            "1 while that is within target_itl_ms, else 0.",
            lambda load: load.meets_itl_target,
        ),
    }
    COUNTERS: dict[str, tuple[str, Callable[[EngineLoad], float]]] = {  # noqa: RUF012 - a constant
        "vllm:num_preemptions": ("Sequences put back for lack of blocks.", lambda load: load.num_preemptions),
        "vllm:prompt_tokens": ("Prompt tokens computed.", lambda load: load.prompt_tokens),
        "vllm:generation_tokens": ("Tokens generated.", lambda load: load.generation_tokens),
        "vllm:prefix_cache_queries": (
            "Tokens looked up in the prefix cache.",
            lambda load: load.prefix_cache_queries,
        ),
        "vllm:prefix_cache_hits": ("Tokens found there.", lambda load: load.prefix_cache_hits),
        "headrace_engine_steps": ("Forward passes.", lambda load: load.num_steps),
    }

    def __init__(self, links: Callable[[], Iterable[EngineLink]]) -> None:
        self._links = links

    def collect(self) -> Iterator[Metric]:
        links = list(self._links())
        up = GaugeMetricFamily(
            "headrace_engine_up", "1 while an engine takes requests.", labels=ENGINE_LABELS
        )
        for link in links:
            up.add_metric([link.model, link.engine_id], float(link.state is LinkState.READY))
        yield up
        reported = [(link, link.load) for link in links if link.load is not None]
        for name, (text, value) in self.GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=ENGINE_LABELS)
            for link, load in reported:
                if (figure := value(load)) is not None:
                    gauge.add_metric([link.model, link.engine_id], float(figure))
            yield gauge
        for name, (text, value) in self.COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=ENGINE_LABELS)
            for link, load in reported:
                counter.add_metric([link.model, link.engine_id], value(load))
            yield counter
