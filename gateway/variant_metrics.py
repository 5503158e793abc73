"""A keeper of the ledger: the figures of each variant of each route, for Prometheus. By who has answered."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.metrics import INTER_TOKEN_BUCKETS_S, REQUEST_BUCKETS_S, TTFT_BUCKETS_S
from shared.usage import Outcome, UsageRecord

_LABELS = ("route", "variant")
OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "failed", "aborted")


class VariantMetrics:
    """Labels only ever hold configured names. Shadow traffic is not in here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, about, _LABELS, buckets=buckets, registry=registry)

        self._requests = Counter(
            "headrace_variant_requests", "Requests for a model that have ended, by route and variant.",
            (*_LABELS, "outcome"), registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "headrace_variant_tokens", "Tokens of prompts and of answers, by route and variant.",
            (*_LABELS, "direction"), registry=registry,
        )  # fmt: skip
        self._time_to_first_token = histogram(
            "headrace_variant_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            TTFT_BUCKETS_S,
        )
        self._time_per_output_token = histogram(
            "headrace_variant_time_per_output_token_seconds",
            "Mean of each request over the tokens behind its first one.",
            INTER_TOKEN_BUCKETS_S,
        )
        self._duration = histogram(
            "headrace_variant_request_duration_seconds",
            "From the arrival of a request to the end of its answer.",
            REQUEST_BUCKETS_S,
        )
        self._series: dict[tuple[str, str], _Series] = {}

    def keep(self, record: UsageRecord) -> None:
        if record.is_shadow or not record.route:  # refused before there was a route
            return
        key = (record.route, record.variant)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._series_of(key)
        series.keep(record)

    def _series_of(self, labels: tuple[str, str]) -> _Series:
        return _Series(
            requests={outcome: self._requests.labels(*labels, outcome) for outcome in OUTCOMES},
            input_tokens=self._tokens.labels(*labels, "input"),
            output_tokens=self._tokens.labels(*labels, "output"),
            time_to_first_token=self._time_to_first_token.labels(*labels),
            time_per_output_token=self._time_per_output_token.labels(*labels),
            duration=self._duration.labels(*labels),
        )


class _Series:
    """Of one variant: looked up once, not with each request."""

    def __init__(
        self,
        *,
        requests: dict[Outcome, Counter],
        input_tokens: Counter,
        output_tokens: Counter,
        time_to_first_token: Histogram,
        time_per_output_token: Histogram,
        duration: Histogram,
    ) -> None:
        self._requests = requests
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._time_to_first_token = time_to_first_token
        self._time_per_output_token = time_per_output_token
        self._duration = duration

    def keep(self, record: UsageRecord) -> None:
        self._requests[record.outcome].inc()
        if record.input_tokens:
            self._input_tokens.inc(record.input_tokens)
        if record.output_tokens:
            self._output_tokens.inc(record.output_tokens)
        if record.time_to_first_token_s is not None:
            self._time_to_first_token.observe(record.time_to_first_token_s)
        if record.outcome != "ok" or record.engine_id is None:  # None: it has only been tokenised or shown
            return
        self._duration.observe(record.duration_s)
        if (time_per_output_token_s := record.time_per_output_token_s) is not None:
            self._time_per_output_token.observe(time_per_output_token_s)
