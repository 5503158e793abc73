"""One engine, as seen by this gateway: a socket, its task, and the requests that run there."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gateway.mailbox import Mailbox, VectorMailbox
from shared.identifiers import EngineEpoch, EngineId, GatewayId, RequestId
from shared.messages import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Dead,
    Embed,
    Embedded,
    EngineHello,
    EngineLoad,
    FromEngine,
    FromGateway,
    GatewayHello,
    Heartbeat,
    ModelCard,
    ProtocolError,
    Reject,
    ResetPrefixCache,
    SequenceUpdate,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.redis_schema import EngineRecord
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SILENCE_LIMIT_S = 5.0  # an engine sends a heartbeat every half second
SEND_HIGH_WATER_MARK = 10_000
RECEIVE_HIGH_WATER_MARK = 100_000
STALL_LIMIT_S = 30.0  # work is queued and no step was finished for so long: something is wrong
EXPECTED_OUTPUT_TOKENS = 256  # what a request is taken to generate when it may generate more


class EngineLostError(Exception):
    """The engine died or fell silent; what ran there is lost.

    `by_a_step` says that one of its own steps failed: whatever was in that step may fail elsewhere, too.
    """

    def __init__(self, message: str, *, by_a_step: bool = False) -> None:
        super().__init__(message)
        self.by_a_step = by_a_step


class EngineRejectedError(Exception):
    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.message)
        self.reject = reject


class LinkState(enum.Enum):
    CONNECTING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()  # runs what it has, takes nothing new
    LOST = enum.auto()


class _Running:
    """A sequence that runs on this engine, or an Embed, and what it weighs in balancing."""

    __slots__ = ("cost_tokens", "mailbox")

    def __init__(self, mailbox: Mailbox | VectorMailbox, cost_tokens: int) -> None:
        self.mailbox = mailbox
        self.cost_tokens = cost_tokens


def cost_of(num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """Tokens that a sequence is expected to cost, before anything is known about its answer."""
    num_beams = 1 if sampling.beam_search is None else sampling.beam_search.width
    return num_prompt_tokens + num_beams * min(sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)


class EngineLink:
    """Owns the DEALER socket. `run` is its only reader and ends when the engine is lost.

    A link serves one epoch of an engine. It does not reconnect: a restarted engine knows nothing of
    our requests, so it gets a new link and the old one fails them.
    """

    def __init__(
        self,
        record: EngineRecord,
        context: zmq.asyncio.Context,
        gateway_id: GatewayId,
        known_bundles: list[str],
        load_tokenizer: Callable[[EngineHello], Awaitable[Tokenizer]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id: EngineId = record.engine_id
        self.epoch: EngineEpoch = record.epoch
        self.model: str = record.model
        self.state = LinkState.CONNECTING
        self.load: EngineLoad | None = None
        self.fingerprint = ""  # of the model and how it is run; equal for engines that answer alike
        self.outstanding_tokens = 0  # of this gateway's requests
        self._card: ModelCard | None = None
        self._tokenizer: Tokenizer | None = None
        self._load_tokenizer = load_tokenizer
        self._clock = clock
        self._heard_at = clock()
        self._progressed_at = clock()
        self._running: dict[RequestId, _Running] = {}
        self._unheard: set[RequestId] = set()  # those of them of which nothing has come yet
        self._socket = _dealer(context, gateway_id, record.address)
        self._hello = GatewayHello(PROTOCOL_VERSION, gateway_id, known_bundles)

    @property
    def card(self) -> ModelCard:
        assert self._card is not None, "only a link that has been ready has a model card"
        return self._card

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "only a link that has been ready has a tokenizer"
        return self._tokenizer

    @property
    def num_in_flight(self) -> int:
        return len(self._running)

    @property
    def load_tokens(self) -> int:
        """Work that waits here, in tokens: ours at once, that of other gateways as last reported."""
        reported = self.load.outstanding_tokens if self.load is not None else 0
        return max(self.outstanding_tokens, reported)

    @property
    def is_stalled(self) -> bool:
        return self._clock() - self._progressed_at > STALL_LIMIT_S

    def submit(self, message: Submit, mailbox: Mailbox) -> None:
        """Starts a sequence. Its updates go to the mailbox until it ends or is aborted."""
        self._start(message, mailbox, cost_of(len(message.prompt_token_ids), message.sampling))

    def embed(self, message: Embed, mailbox: VectorMailbox) -> None:
        """Starts the embedding of some texts. Their vectors go to the mailbox, unless it is aborted."""
        self._start(message, mailbox, sum(map(len, message.token_id_lists)))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    def abort(self, request_ids: list[RequestId]) -> None:
        """Ends those of the sequences and Embeds that still run here; idempotent."""
        running = [request_id for request_id in request_ids if self._forget(request_id)]
        if running and self.state is not LinkState.LOST:
            self._send(Abort(running))

    def _start(self, message: Submit | Embed, mailbox: Mailbox | VectorMailbox, cost: int) -> None:
        assert self.state is LinkState.READY, f"a request for an engine that is {self.state.name}"
        self._running[message.request_id] = _Running(mailbox, cost)
        self._unheard.add(message.request_id)
        self.outstanding_tokens += cost
        self._send(message)

    async def run(self) -> None:
        """Serves the link until the engine is lost, then fails what still ran."""
        loss = EngineLostError("the link was closed")
        try:
            self._send(self._hello)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch_connection())
                tasks.create_task(self._watch_silence())
        except* EngineLostError as group:
            [loss, *_] = [each for each in group.exceptions if isinstance(each, EngineLostError)]
            logger.warning("engine %s (epoch %s) is lost: %s", self.engine_id, self.epoch, loss)
        finally:
            self._close(loss.by_a_step)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._heard_at = self._clock()
            try:
                message = decode(frames)
            except ProtocolError as error:
                raise EngineLostError(f"it does not speak our protocol: {error}") from error
            await self._handle(message)

    async def _handle(self, message: FromEngine | FromGateway) -> None:
        match message:
            case StepResult():
                self._note(message.load)
                for update in self._in_order(message.updates):
                    self._deliver(update)
            case Embedded():
                self._note(message.load)
                self._deliver(message)
            case Heartbeat():
                self._note(message.load)
            case Reject():
                running = self._running.get(message.request_id)
                if running is not None:
                    self._forget(message.request_id)
                    running.mailbox.fail(EngineRejectedError(message))
            case EngineHello():
                await self._greet(message)
            case Bye():
                self.state = LinkState.DRAINING
            case Dead():
                raise EngineLostError(f"it died: {message.reason}", by_a_step=True)
            case _:
                raise EngineLostError(f"it sent a {type(message).__name__}, which only gateways send")

    def _in_order(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """First tokens before all others: handlers run in the order in which they are woken, and who waits
        for a first token has waited for longer than a millisecond matters to a stream that flows."""
        unheard = self._unheard
        if not unheard:
            return updates
        ordered = sorted(updates, key=lambda update: update.request_id not in unheard)
        unheard.difference_update(update.request_id for update in updates)
        return ordered

    def _deliver(self, answer: SequenceUpdate | Embedded) -> None:
        running = self._running.get(answer.request_id)
        if running is None:
            return  # aborted while this was on its way
        match running.mailbox, answer:
            case Mailbox() as mailbox, SequenceUpdate() as update:
                mailbox.put(update)
                is_last = update.finish_reason is not None
            case VectorMailbox() as mailbox, Embedded() as embedded:
                mailbox.put(embedded)
                is_last = True
            case _:
                raise EngineLostError(f"it sent a {type(answer).__name__} for another kind of request")
        if is_last:
            self._forget(answer.request_id)

    def _note(self, load: EngineLoad) -> None:
        is_idle = load.num_running + load.num_waiting == 0
        if is_idle or self.load is None or load.num_steps > self.load.num_steps:
            self._progressed_at = self._clock()
        self.load = load

    async def _greet(self, hello: EngineHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise EngineLostError(f"it speaks protocol version {hello.protocol_version}")
        if hello.epoch != self.epoch:
            raise EngineLostError("it was restarted before we connected")
        self._card = hello.model
        self.fingerprint = _fingerprint(hello)
        try:
            self._tokenizer = await self._load_tokenizer(hello)
        except Exception as error:  # somebody else's template or tokenizer file: any error is possible
            raise EngineLostError(f"its text bundle cannot be used: {error}") from error
        self.state = LinkState.READY
        logger.info("engine %s (epoch %s) is ready for %s", self.engine_id, self.epoch, self.model)

    async def _watch_connection(self) -> None:
        """Hears at once when the engine's end of the connection closes, as after kill -9."""
        monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            while True:
                event = parse_monitor_message(await monitor.recv_multipart())
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    raise EngineLostError("its connection was closed")
        finally:
            self._socket.disable_monitor()

    async def _watch_silence(self) -> None:
        """Notices an engine that is stopped or cut off, whose connection stays open."""
        interval_s = SILENCE_LIMIT_S / 5
        while True:
            slept_from = self._clock()
            await asyncio.sleep(interval_s)
            if self._clock() - slept_from > 2 * interval_s:
                self._heard_at = self._clock()  # it was us who stood still: messages may wait to be read
            if self._clock() - self._heard_at > SILENCE_LIMIT_S:
                raise EngineLostError(f"nothing was heard from it for {SILENCE_LIMIT_S:.0f} s")

    def _send(self, message: FromGateway) -> None:
        # DEALER keeps the order. At the high-water mark the future waits, which happens only when
        # the engine reads nothing; the silence watch then ends the link.
        future = cast("asyncio.Future[Any]", self._socket.send_multipart(encode(message)))
        future.add_done_callback(_retrieve)

    def _forget(self, request_id: RequestId) -> bool:
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self._unheard.discard(request_id)
        self.outstanding_tokens -= running.cost_tokens
        return True

    def _close(self, by_a_step: bool) -> None:
        self.state = LinkState.LOST
        for running in self._running.values():  # clients read this: the reason is for our log only
            running.mailbox.fail(EngineLostError(f"engine {self.engine_id} was lost", by_a_step=by_a_step))
        self._running.clear()
        self._unheard.clear()
        self.outstanding_tokens = 0
        with contextlib.suppress(zmq.ZMQError):  # closing twice
            self._socket.close(linger=0)


def _fingerprint(hello: EngineHello) -> str:
    """The same for engines of one model that are configured alike, whatever memory they have."""
    card = hello.model
    model = (card.architecture, card.vocab_size, card.dtype, card.max_model_len, hello.text_bundle_hash)
    return f"fp_{hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:12]}"


def _dealer(context: zmq.asyncio.Context, gateway_id: GatewayId, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, gateway_id.encode())
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.connect(address)
    return socket


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Takes note of a send that was cancelled by the close of its socket; the close has told everybody."""
    if not future.cancelled():
        future.exception()
