"""The loop of a generating engine, without threads: what comes is there before it runs."""

from __future__ import annotations

import zmq

from engine_service.step_loop import StepLoop
from engine_service.transport.inbox import DrainRequested, GatewayAddress, Inbox, SubmitReceived
from engine_service.transport.outbox import Outbox
from shared.identifiers import EngineEpoch
from tests.unit.worlds import make_submit, make_world


def test_an_engine_whose_only_request_expired_is_idle_and_not_stalled() -> None:
    world = make_world()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = Inbox(10)
    outbox = Outbox(context.socket(zmq.PUSH), EngineEpoch("e"), world.engine.load())
    now_s = 0.0
    loop = StepLoop(world.engine, inbox, outbox, EngineEpoch("e"), lambda: now_s)
    submit = make_submit("late", [1], timeout_s=0.0)
    inbox.offer(SubmitReceived(GatewayAddress(b"g"), submit, world.clock()))
    inbox.put(DrainRequested(30.0))
    loop.run()
    now_s += 1000
    assert not world.engine.has_work
    assert loop.stalled_for_s == 0
    context.destroy(linger=0)
