"""A gateway's end of the wire to one engine; the other end is a socket that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq.asyncio

from gateway.engine_link import EngineLink, LinkState
from gateway.mailbox import Mailbox
from shared.byte_text import byte_text_bundle
from shared.identifiers import EngineEpoch, EngineId, GatewayId, RequestId, TenantId
from shared.messages import (
    PROTOCOL_VERSION,
    EngineHello,
    EngineLoad,
    FromEngine,
    GatewayHello,
    ModelCard,
    SequenceUpdate,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.redis_schema import EngineRecord
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer

EPOCH = EngineEpoch("e")
CARD = ModelCard("m", "FakeModel", 261, 4096, 64, 16, 100, "float32", [256])


@dataclass
class Wire:
    link: EngineLink
    engine: zmq.asyncio.Socket
    handled: asyncio.Queue[str] = field(default_factory=asyncio.Queue)  # whose updates were taken
    handlers: list[asyncio.Task[None]] = field(default_factory=list)

    async def submit(self, name: str) -> None:
        mailbox = Mailbox({RequestId(name): 100})
        sampling = SamplingParams(100, seed=1, temperature=0.0)
        self.link.submit(Submit(RequestId(name), [1, 2, 3], sampling, TenantId("t")), mailbox)
        self.handlers.append(asyncio.create_task(self._handle(name, mailbox)))
        assert isinstance(await self.receive(), Submit)

    async def _handle(self, name: str, mailbox: Mailbox) -> None:
        while True:
            await mailbox.take()
            self.handled.put_nowait(name)

    async def receive(self) -> object:
        return decode((await self.engine.recv_multipart())[1:])

    async def send(self, message: FromEngine) -> None:
        await self.engine.send_multipart([b"g", *encode(message)])

    async def step(self, *names: str) -> list[str]:
        """The order in which the handlers of a step's sequences get to run."""
        updates = [SequenceUpdate(RequestId(name), [7]) for name in names]
        await self.send(StepResult(updates, EngineLoad(len(names), 0, 100, 100, 0)))
        async with asyncio.timeout(10):
            return [await self.handled.get() for _ in names]


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)
    address = f"ipc://{tmp_path}/e"
    engine.bind(address)
    bundle = byte_text_bundle()

    async def load_tokenizer(_hello: EngineHello) -> Tokenizer:
        return Tokenizer(bundle)

    record = EngineRecord(EngineId("e"), EPOCH, address, "m", "ready", 1)
    link = EngineLink(record, context, GatewayId("g"), [], load_tokenizer)
    running = asyncio.create_task(link.run())
    wire = Wire(link, engine)
    assert isinstance(await wire.receive(), GatewayHello)
    await wire.send(EngineHello(PROTOCOL_VERSION, EngineId("e"), EPOCH, CARD, "hash", bundle))
    async with asyncio.timeout(10):
        while link.state is not LinkState.READY:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    yield wire
    for task in (*wire.handlers, running):
        task.cancel()
    await asyncio.gather(*wire.handlers, running, return_exceptions=True)
    context.destroy(linger=0)


async def test_first_tokens_are_handled_before_those_of_streams_that_flow(wire: Wire) -> None:
    for name in ("a", "b", "c"):
        await wire.submit(name)
    assert await wire.step("a", "b") == ["a", "b"]
    assert await wire.step("a", "b", "c") == ["c", "a", "b"]
    assert await wire.step("a", "b", "c") == ["a", "b", "c"], "only its first one"


async def test_a_sequence_that_was_aborted_unheard_is_forgotten(wire: Wire) -> None:
    await wire.submit("a")
    await wire.submit("b")
    wire.link.abort([RequestId("a")])
    assert await wire.step("b") == ["b"]
    assert wire.link.num_in_flight == 1
    assert not wire.link._unheard
