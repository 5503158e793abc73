"""Where to raise an alarm, read from the probes: what a replica looks like at four fifths of its capacity."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.plan.measurement import Measurement
from loadtest.plan.plan import KV_LIMIT
from loadtest.report.rate_curves import slo_tier

SHARE_OF_CAPACITY = 0.8
MAX_ERROR_SHARE = 0.05
LEAST_WAITING = 1.0  # fewer on average are no queue


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Means over time, of one engine. None: not known, and no rule is made of it."""

    rate: float  # requests/s
    running: float | None  # as the server counts
    waiting: float | None
    in_flight: float | None  # running and waiting together; from the client where the server does not tell
    is_in_flight_of_client: bool
    kv_usage: float
    kv_usage_at_capacity: float | None  # measured
    error_share: float
    attainment: float
    ttft_s: float | None
    tpot_s: float | None
    e2el_s: float | None


def thresholds_of(measured: Measurement) -> Thresholds:
    rate = SHARE_OF_CAPACITY * measured.capacity.low
    running = None if measured.running is None else measured.running.at(rate)
    waiting = None if measured.waiting is None else max(LEAST_WAITING, measured.waiting.at(rate))
    in_flight, is_of_client = None, False
    if measured.running is not None and measured.waiting is not None:
        in_flight = measured.running.at(rate) + measured.waiting.at(rate)
    elif measured.in_flight is not None:
        in_flight, is_of_client = measured.in_flight.at(rate), True
    limits_s = slo_tier(measured.tier.slo).limits_s
    at_capacity = None if measured.kv_usage is None else measured.kv_usage.at(measured.capacity.low)
    return Thresholds(
        rate=rate,
        running=running,
        waiting=waiting,
        in_flight=in_flight,
        is_in_flight_of_client=is_of_client,
        kv_usage=KV_LIMIT,
        kv_usage_at_capacity=at_capacity,
        error_share=MAX_ERROR_SHARE,
        attainment=measured.tier.slo.attainment,
        ttft_s=limits_s.get("ttft"),
        tpot_s=limits_s.get("tpot"),
        e2el_s=limits_s.get("e2el"),
    )
