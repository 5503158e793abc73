"""Which limits apply, what clients are told of them, and shares while Redis is away."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.limits.dimensions import Dimensions, dimensions_of
from gateway.limits.headers import Standing, duration, openai_headers, standings
from gateway.limits.local_share import LocalShare
from gateway.limits.refusal import refusal
from gateway.limits.reservation import Demand, Reservation
from gateway.limits.settlements import MAX_WAITING, Settlement, Settlements
from shared.config import Limits, TenantConfig
from shared.identifiers import RequestId
from shared.redis_schema import RedisKeys


def limits_of(of_this_key: Limits | None = None, **fields: Any) -> Dimensions:
    tenant = TenantConfig.model_validate({"name": "t", **fields})
    return dimensions_of(tenant, "chat", "k", of_this_key, RedisKeys("n"), "fail_open")


def names(dimensions: Dimensions) -> list[str]:
    return [dimension.reason for dimension in dimensions.all]


def test_a_request_has_the_limits_of_its_tenant_its_route_and_its_key():
    dimensions = limits_of(
        requests_per_minute=1,
        route_limits={"chat": {"tokens_per_minute": 2}, "other": {"tokens_per_day": 3}},
        key_limits={"max_concurrency": 4},
    )
    assert names(dimensions) == [
        "tenant.requests_per_minute",
        "route.tokens_per_minute",
        "key.max_concurrency",
    ]


def test_a_key_with_limits_of_its_own_has_no_others_of_keys():
    dimensions = limits_of(Limits(requests_per_minute=9), key_limits={"max_concurrency": 4})
    assert names(dimensions) == ["key.requests_per_minute"]


def test_the_tightest_bound_of_one_request_counts():
    dimensions = limits_of(
        max_output_tokens=50,
        route_limits={"chat": {"max_output_tokens": 20}},
        key_limits={"max_output_tokens": 30},
    )
    assert dimensions.max_output == (20, "route.max_output_tokens")
    assert dimensions.max_prompt is None


def test_each_limit_has_its_own_mode_or_that_of_the_gateway():
    dimensions = limits_of(
        requests_per_minute=1,
        tokens_per_minute=1,
        on_redis_failure={"tokens_per_minute": "fail_closed"},
        key_limits={"requests_per_minute": 1, "on_redis_failure": "local_share"},
    )
    assert [each.on_redis_failure for each in dimensions.all] == ["fail_open", "fail_closed", "local_share"]


def test_what_is_reserved_of_an_answer_is_bounded_for_each_choice():
    assert Demand(10, num_choices=3, max_tokens=4000).reserved_output(256) == 768
    assert Demand(10, num_choices=3, max_tokens=5).reserved_output(256) == 15
    assert Demand(10).reserved_output(256) == 0


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0ms"),
        (11_001, "12ms"),
        (1_000_000, "1s"),
        (1_500_000, "1.5s"),
        (360_000_000, "6m0s"),
        (86_399_000_000, "23h59m59s"),
    ],
)
def test_durations_are_written_as_openai_does(microseconds, text):
    assert duration(microseconds) == text


def test_the_tightest_scope_is_shown():
    dimensions = limits_of(
        requests_per_minute=60,
        tokens_per_minute=100,
        key_limits={"requests_per_minute": 10, "max_concurrency": 1},
    )
    standing_of = standings(dimensions.all, [30, 1000, 100, 0, 5, 2000])
    assert standing_of == {"requests": Standing(5, 10, 2000), "tokens": Standing(100, 100, 0)}
    assert openai_headers(standing_of)["x-ratelimit-remaining-requests"] == "5"


def test_only_waits_that_help_are_told():
    rate, quota = limits_of(requests_per_minute=60, tokens_per_day=10).all
    waiting = refusal(rate, 0.2, {})
    assert (waiting.code, waiting.headers["Retry-After"]) == ("rate_limit_exceeded", "1")
    for hopeless in (refusal(rate, None, {}), refusal(quota, 3600.0, {})):
        assert hopeless.headers["x-should-retry"] == "false"
        assert "Retry-After" not in hopeless.headers


# ---------------------------------------------------------------------- while Redis is away


class Shares:
    def __init__(self, **fields: Any) -> None:
        self.dimensions = limits_of(on_redis_failure="local_share", **fields)
        self.now = 1000.0
        self.share = LocalShare(lambda: self.now, lambda: self.now)

    def reserve(self, num_gateways: int, input_tokens: int = 1, output_tokens: int = 0) -> Reservation | None:
        reservation = Reservation(RequestId("r"), self.dimensions, input_tokens, output_tokens)
        if self.share.reserve(reservation, num_gateways) is not None:
            return None
        self.share.hold(reservation)
        return reservation

    def num_let_in(self, number: int, num_gateways: int, input_tokens: int = 1) -> int:
        return sum(self.reserve(num_gateways, input_tokens) is not None for _ in range(number))


def test_the_shares_of_all_gateways_add_up_to_the_limit():
    for num_gateways in (1, 2, 3, 4):
        shares = [Shares(requests_per_minute=60) for _ in range(num_gateways)]
        assert sum(each.num_let_in(100, num_gateways) for each in shares) == 60


def test_a_share_comes_back_at_its_part_of_the_rate():
    shares = Shares(requests_per_minute=60)
    assert shares.num_let_in(100, 4) == 15
    shares.now += 8.0  # in which two of eight are this gateway's
    assert shares.num_let_in(100, 4) == 2


def test_a_share_of_slots_is_full_and_free_again():
    shares = Shares(max_concurrency=4)
    first, second = shares.reserve(2), shares.reserve(2)
    assert first is not None
    assert second is not None
    assert shares.reserve(2) is None
    shares.share.leave(first)
    shares.share.leave(first)  # idempotent
    assert shares.reserve(2) is not None
    assert shares.reserve(2) is None


def test_all_shares_are_charged_or_none():
    shares = Shares(requests_per_minute=4, tokens_per_minute=100)
    assert shares.num_let_in(2, 1, 90) == 1
    assert shares.num_let_in(10, 1) == 3  # the refused one took no request of the four


def test_a_days_share_ends_with_the_day():
    shares = Shares(tokens_per_day=100)
    assert shares.num_let_in(10, 2, 10) == 5
    shares.now += 86_400.0
    assert shares.num_let_in(10, 2, 10) == 5


def test_what_cannot_be_settled_is_bounded_and_told_once(caplog):
    reservation = Reservation(RequestId("r"), limits_of(), 0, 0)
    settlements = Settlements()
    for _ in range(MAX_WAITING + 10):
        settlements.add(Settlement(reservation, 0, 0, is_unsure=False))
    assert len(settlements) == MAX_WAITING
    assert len(caplog.records) == 1
    taken = settlements.take(5)
    settlements.put_back(taken)
    assert len(settlements) == MAX_WAITING
