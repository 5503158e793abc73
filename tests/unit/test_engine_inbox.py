"""The inbox: what is bounded, what is not, and the two ways of an abort. And addresses."""

from __future__ import annotations

import pytest

from engine_service.transport.inbox import AbortReceived, GatewayAddress, GatewayLost, Inbox, SubmitReceived
from shared.engine_endpoint import advertised_address
from shared.errors import ConfigError
from shared.identifiers import RequestId
from tests.unit.worlds import make_submit

GATEWAY = GatewayAddress(b"g")


def test_submits_are_bounded_and_aborts_are_not() -> None:
    inbox = Inbox(max_requests=2)
    first, second, third = (SubmitReceived(GATEWAY, make_submit(f"r{n}", [1]), 0.0) for n in range(3))
    assert inbox.offer(first)
    assert inbox.offer(second)
    assert not inbox.offer(third)
    lost = GatewayLost(GATEWAY)
    inbox.put(lost)
    assert inbox.take(wait=False) == [first, second, lost]
    assert inbox.offer(third)


def test_an_abort_is_seen_at_once_and_again_in_its_place() -> None:
    inbox = Inbox(max_requests=2)
    submit = SubmitReceived(GATEWAY, make_submit("r", [1]), 0.0)
    abort = AbortReceived(GATEWAY, [RequestId("r")])
    inbox.offer(submit)
    inbox.put(abort)
    assert inbox.take_fast_aborts() == [abort]
    assert inbox.take_fast_aborts() == []
    assert inbox.take(wait=True) == [submit, abort]


def test_the_advertised_address_has_the_real_port() -> None:
    bound = "tcp://127.0.0.1:5123"
    assert advertised_address(bound, None) == bound
    assert advertised_address("tcp://0.0.0.0:5123", "tcp://engine-0:*") == "tcp://engine-0:5123"
    assert advertised_address("tcp://0.0.0.0:5123", "tcp://engine-0:80") == "tcp://engine-0:80"
    assert advertised_address("tcp://0.0.0.0:5123", None).endswith(":5123")
    assert "0.0.0.0" not in advertised_address("tcp://0.0.0.0:5123", None)
    with pytest.raises(ConfigError):
        advertised_address(bound, "engine-0:80")
