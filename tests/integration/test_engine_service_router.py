"""The Router with a gateway that does not read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from engine_service.transport.inbox import GatewayAddress, GatewayLost, Inbox
from engine_service.transport.outbox import STOP_FRAMES
from engine_service.transport.router import Router
from shared.engine_endpoint import bind_router
from shared.identifiers import EngineEpoch, EngineId, RequestId
from shared.messages import PROTOCOL_VERSION, EngineHello, FromEngine, ModelCard, Reject, encode
from tests.integration.engine_peer import peer

HELLO = EngineHello(
    PROTOCOL_VERSION,
    EngineId("e"),
    EngineEpoch("1"),
    ModelCard("m", "FakeModel", 10, 10, 1, 1, 1, "float32", []),
    "hash",
)


@dataclass
class RouterWorld:
    address: str
    inbox: Inbox
    send: Callable[[str, FromEngine], object]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RouterWorld]:
    address = f"ipc://{tmp_path}/e.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_router(context, address, send_high_water_mark=2)
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://wire")
    push.connect("inproc://wire")
    inbox = Inbox(max_requests=10)
    router = Router(socket, pull, inbox, lambda _: HELLO, max_backlog_messages=10)
    thread = threading.Thread(target=router.run, daemon=True)
    thread.start()
    yield RouterWorld(
        address, inbox, lambda gateway, message: push.send_multipart([gateway.encode(), *encode(message)])
    )
    push.send_multipart(STOP_FRAMES)
    thread.join(10)
    assert not thread.is_alive()
    context.destroy(linger=0)


def large_message(number: int) -> Reject:
    return Reject(RequestId(f"r{number}"), "internal_error", "x" * 200_000)


def test_a_slow_gateway_gets_all_that_was_kept_back_in_order(world: RouterWorld) -> None:
    with peer(world.address, "slow", receive_high_water_mark=1) as slow:
        slow.hello()
        for number in range(10):
            world.send("slow", large_message(number))
        received = [slow.receive() for _ in range(10)]
        assert [message.request_id for message in received if isinstance(message, Reject)] == [
            f"r{number}" for number in range(10)
        ]


def test_a_gateway_that_does_not_read_loses_its_requests_and_holds_up_nobody(world: RouterWorld) -> None:
    with peer(world.address, "slow", receive_high_water_mark=1) as slow, peer(world.address, "fast") as fast:
        slow.hello()
        fast.hello()
        for number in range(60):
            world.send("slow", large_message(number))
            world.send("fast", large_message(number))
            message = fast.receive()
            assert isinstance(message, Reject)
            assert message.request_id == f"r{number}"
        assert world.inbox.take(wait=True) == [GatewayLost(GatewayAddress(b"slow"))]
        # It reads what was sent before, without a gap, and after that nothing.
        num_read = 0
        while slow.socket.poll(300):
            message = slow.receive()
            assert isinstance(message, Reject)
            assert message.request_id == f"r{num_read}"
            num_read += 1
        assert num_read < 60
        slow.hello()  # and it may begin again
