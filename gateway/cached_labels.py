"""A metric with labels whose series are looked up in a dict: prometheus_client takes a lock and builds a new
key each time, which is as long as all else that a request costs it."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client.metrics import MetricWrapperBase

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


class CachedLabels(Generic[MetricT]):
    """Its series are never removed: labels hold configured names only."""

    def __init__(self, metric: MetricT) -> None:
        self._metric: MetricT = metric
        self._series: dict[tuple[str, ...], MetricT] = {}

    def labels(self, *values: str) -> MetricT:
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._metric.labels(*values)
        return series
