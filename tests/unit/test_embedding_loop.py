"""The loop of an embedding engine: what comes while a pass is computed, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from engine_service.embedding_loop import EmbeddingLoop
from engine_service.fake_embedder import FakeEmbedder
from engine_service.served_embedder import ServedEmbedder, build_embedding_engine, make_card
from engine_service.transport.inbox import (
    AbortReceived,
    DrainRequested,
    EmbedReceived,
    GatewayAddress,
    GatewayLost,
    Inbox,
    PrefixCacheReset,
    SubmitReceived,
)
from engine_service.transport.outbox import Outbox
from shared.byte_text import byte_text_bundle
from shared.config import ModelConfig
from shared.identifiers import EngineEpoch, RequestId, TenantId
from shared.messages import Bye, Embed, Embedded, FromEngine, FromGateway, Heartbeat, Reject, decode
from tests.unit.worlds import make_submit

A, B = GatewayAddress(b"a"), GatewayAddress(b"b")
TIMEOUT_S = 10.0
M = TypeVar("M", bound=FromEngine)


class GatedEmbedder(FakeEmbedder):
    """Each pass says that it has begun, and ends when it is let."""

    def __init__(self) -> None:
        super().__init__(4)
        self.passes: list[list[list[int]]] = []
        self._begun = threading.Semaphore(0)
        self._may_end = threading.Semaphore(0)

    def vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        self.passes.append([list(text) for text in texts])
        self._begun.release()
        assert self._may_end.acquire(timeout=TIMEOUT_S), "the pass was never let end"
        return super().vectors(texts)

    def wait_for_pass(self) -> None:
        assert self._begun.acquire(timeout=TIMEOUT_S), "no pass began"

    def let_end(self, num_passes: int = 1) -> None:
        self._may_end.release(num_passes)


class World:
    """A loop and an outbox in threads of their own; what it says comes out of a socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.now_s = 100.0
        self.embedder = GatedEmbedder()
        config = ModelConfig(name="m", source="fake:", runner="pooling", max_num_seqs=2)
        card = make_card(
            config,
            architecture="Fake",
            vocab_size=100,
            max_model_len=50,
            embedding_dim=4,
            matryoshka_dimensions=None,
        )
        engine = build_embedding_engine(config, ServedEmbedder(self.embedder, card, byte_text_bundle()))
        self._pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._pull.bind("inproc://wire")
        push.connect("inproc://wire")
        self.inbox = Inbox(max_requests=100)
        self.outbox = Outbox(push, EngineEpoch("1"), engine.load())
        self.loop = EmbeddingLoop(engine, self.inbox, self.outbox, EngineEpoch("1"), lambda: self.now_s)
        self.threads = [threading.Thread(target=role.run, daemon=True) for role in (self.outbox, self.loop)]
        self.said: list[tuple[bytes, FromEngine]] = []

    def embed(
        self,
        name: str,
        text: list[int],
        gateway: GatewayAddress = A,
        num_texts: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        embed = Embed(RequestId(name), [text] * num_texts, TenantId("t"), timeout_s=timeout_s)
        assert self.inbox.offer(EmbedReceived(gateway, embed, self.now_s))

    def wait_for(self, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> tuple[bytes, M]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            assert time.monotonic() < deadline_s, f"no such {kind.__name__}"  # heartbeats never end
            if not self._pull.poll(100):
                continue
            address, *frames = self._pull.recv_multipart()
            if frames:
                message = decode(frames)
                assert not isinstance(message, FromGateway)
                self.said.append((address, message))
                if isinstance(message, kind) and condition(message):
                    return address, message

    def answered(self) -> list[str]:
        return [message.request_id for _, message in self.said if isinstance(message, Embedded)]


@pytest.fixture
def world() -> Iterator[World]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    world = World(context)
    for thread in world.threads:
        thread.start()
    yield world
    world.embedder.let_end(1000)
    world.inbox.put(DrainRequested(0.0))
    world.threads[1].join(TIMEOUT_S)
    world.outbox.stop()
    world.threads[0].join(TIMEOUT_S)
    context.destroy(linger=0)


def test_the_load_shows_what_is_being_computed(world: World) -> None:
    world.embed("running", [1])
    world.embedder.wait_for_pass()
    load = world.outbox.load
    assert (load.num_running, load.num_waiting, load.outstanding_tokens) == (1, 0, 1)
    world.embedder.let_end()
    world.wait_for(Embedded)
    world.wait_for(Heartbeat, lambda beat: beat.load.num_running == 0)


def test_what_was_aborted_or_whose_gateway_has_gone_gets_no_pass_and_no_answer(world: World) -> None:
    world.embed("aborted in its pass", [1])
    world.embedder.wait_for_pass()
    world.embed("aborted in the queue", [2])
    world.embed("of the other gateway", [3], B)
    world.embed("of a gateway that goes", [4], B)
    world.embed("answered", [5])
    names = ["aborted in its pass", "aborted in the queue", "of the other gateway", "never heard of"]
    world.inbox.put(AbortReceived(A, [RequestId(name) for name in names]))
    world.inbox.put(GatewayLost(B))
    world.embedder.let_end(2)
    address, _ = world.wait_for(Embedded)
    assert (address, world.answered()) == (A, ["answered"])
    assert world.embedder.passes == [[[1]], [[5]]]


def test_a_request_whose_time_is_up_is_told_so_and_gets_no_pass(world: World) -> None:
    world.embed("running", [1])
    world.embedder.wait_for_pass()
    world.embed("late", [2], timeout_s=0.0)
    world.embed("in time", [3], timeout_s=1e9)
    world.embedder.let_end(2)
    _, reject = world.wait_for(Reject)
    assert (reject.request_id, reject.code) == ("late", "timed_out")
    world.wait_for(Embedded, lambda embedded: embedded.request_id == "in time")
    assert world.embedder.passes == [[[1]], [[3]]]


def test_an_abort_of_anothers_request_is_passed_over(world: World) -> None:
    world.embed("theirs", [1], B)
    world.embedder.wait_for_pass()
    world.inbox.put(AbortReceived(A, [RequestId("theirs")]))
    world.embedder.let_end()
    assert world.wait_for(Embedded)[0] == B


def test_a_request_to_generate_is_refused_and_a_reset_has_nothing_to_do(world: World) -> None:
    world.inbox.offer(SubmitReceived(A, make_submit("r", [1]), 0.0))
    _, reject = world.wait_for(Reject)
    assert (reject.request_id, reject.code, reject.param) == ("r", "invalid_request", "model")
    world.inbox.put(PrefixCacheReset())
    world.embed("next", [1])
    world.embedder.let_end()
    world.wait_for(Embedded)


def test_a_drain_answers_what_was_accepted_and_nothing_else(world: World) -> None:
    world.embed("accepted", [1], num_texts=3)
    world.embedder.wait_for_pass()
    world.inbox.put(DrainRequested(30.0))
    world.embed("late", [2])
    world.embedder.let_end()
    world.wait_for(Bye)
    _, reject = world.wait_for(Reject)
    assert (reject.request_id, reject.code) == ("late", "draining")
    world.embedder.let_end()
    world.wait_for(Embedded)
    world.threads[1].join(TIMEOUT_S)
    assert not world.threads[1].is_alive()


def test_what_is_not_done_at_the_drain_limit_is_given_back(world: World) -> None:
    world.embed("long", [1], num_texts=5)
    world.embedder.wait_for_pass()
    world.inbox.put(DrainRequested(30.0))
    world.embedder.let_end()
    world.embedder.wait_for_pass()
    world.now_s += 30
    world.embedder.let_end()
    _, reject = world.wait_for(Reject)
    assert (reject.request_id, reject.code) == ("long", "draining")
    world.threads[1].join(TIMEOUT_S)
    assert len(world.embedder.passes) == 2
    assert world.outbox.load.outstanding_tokens == 0


def test_a_pass_that_does_not_end_is_a_stall_and_no_work_is_none(world: World) -> None:
    world.now_s += 1000
    assert world.loop.stalled_for_s == 0
    world.embed("r", [1])
    world.embedder.wait_for_pass()
    world.now_s += 7
    assert world.loop.stalled_for_s == 7
    world.embedder.let_end()
    world.wait_for(Embedded)
    assert world.loop.stalled_for_s == 0
