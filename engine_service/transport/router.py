"""The thread that owns the ROUTER socket: reads what gateways send, writes what the outbox hands on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from engine_service.transport.inbox import (
    AbortReceived,
    EmbedReceived,
    GatewayAddress,
    GatewayLost,
    Inbox,
    PrefixCacheReset,
    SubmitReceived,
)
from engine_service.transport.outbox import STOP_FRAMES, TO_ALL
from shared.identifiers import GatewayId, RequestId
from shared.messages import (
    PROTOCOL_VERSION,
    Abort,
    Embed,
    EngineHello,
    GatewayHello,
    MessageType,
    ProtocolError,
    Reject,
    RejectCode,
    ResetPrefixCache,
    Submit,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

MAX_BACKLOG_MESSAGES = 2000  # per gateway, beside the socket's own high-water mark
_RETRY_MS = 10
_MAX_MESSAGES_PER_TURN = 200  # of one direction, before the other one gets its turn


@dataclass(slots=True)
class _Gateway:
    """A gateway that has said hello, and the messages it was too slow to take."""

    gateway_id: GatewayId
    backlog: deque[list[bytes]] = field(default_factory=deque)


class Router:
    """Knows the gateways. Never blocks on one of them, nor on the step loop.

    A gateway that is gone, or reads so little that its backlog is full, is forgotten: its requests
    end and it gets nothing more, heartbeats included. Since messages to it were dropped, silence is
    the only answer that it cannot mistake for a complete stream.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        wire: zmq.Socket[bytes],
        inbox: Inbox,
        hello_to: Callable[[GatewayHello], EngineHello],
        *,
        max_backlog_messages: int = MAX_BACKLOG_MESSAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wire` is the PULL end of the outbox; the thread that calls `run` owns both sockets."""
        self._router = router
        self._wire = wire
        self._inbox = inbox
        self._num_garbage = 0
        self._hello_to = hello_to
        self._max_backlog_messages = max_backlog_messages
        self._clock = clock
        self._gateways: dict[GatewayAddress, _Gateway] = {}
        self._num_slow = 0
        self._farewell: list[bytes] | None = None  # BYE, for gateways that come after it was said

    def run(self) -> None:
        """Until the outbox says stop. Closes both sockets; what was sent lingers for two seconds."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wire, zmq.POLLIN)
        stopping = False
        while not stopping:
            has_backlog = any(gateway.backlog for gateway in self._gateways.values())
            ready = dict(poller.poll(_RETRY_MS if has_backlog else None))
            if has_backlog:
                self._retry_backlogs()
            if self._wire in ready:
                stopping = self._forward()
            if self._router in ready:
                self._receive()
        self._retry_backlogs()
        self._wire.close()
        self._router.close()

    # ------------------------------------------------------------------ outwards

    def _forward(self) -> bool:
        """Sends on what the outbox has handed over; True when that was its last."""
        for _ in range(_MAX_MESSAGES_PER_TURN):
            try:
                frames = self._wire.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if frames == STOP_FRAMES:
                return True
            address, message = GatewayAddress(frames[0]), frames[1:]
            if address != TO_ALL:
                self._send(address, message)
                continue
            if message[0] == MessageType.BYE.frame:
                self._farewell = message
            for each in list(self._gateways):
                self._send(each, message, droppable=message[0] == MessageType.HEARTBEAT.frame)
        return False

    def _send(self, address: GatewayAddress, message: list[bytes], *, droppable: bool = False) -> None:
        gateway = self._gateways.get(address)
        if gateway is None:
            return  # its requests were ended when it was forgotten
        if not gateway.backlog and self._try_send(address, message):
            return
        if droppable or address not in self._gateways:
            return
        if len(gateway.backlog) >= self._max_backlog_messages:
            self._forget(address, f"has not read {len(gateway.backlog)} messages")
            return
        if not gateway.backlog:
            logger.warning("gateway %.64s is slow to read; its messages are kept back", gateway.gateway_id)
        gateway.backlog.append(message)

    def _try_send(self, address: GatewayAddress, message: list[bytes]) -> bool:
        """False if the gateway takes no more now, or if it is gone (and then forgotten)."""
        try:
            self._router.send_multipart([address, *message], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(address, "is gone")
            return False
        return True

    def _retry_backlogs(self) -> None:
        for address, gateway in list(self._gateways.items()):
            while gateway.backlog and self._try_send(address, gateway.backlog[0]):
                gateway.backlog.popleft()

    def _forget(self, address: GatewayAddress, reason: str) -> None:
        gateway = self._gateways.pop(address, None)
        if gateway is not None:
            logger.warning("gateway %.64s %s; its requests are aborted", gateway.gateway_id, reason)
            self._inbox.put(GatewayLost(address))

    # ------------------------------------------------------------------ inwards

    def _receive(self) -> None:
        for _ in range(_MAX_MESSAGES_PER_TURN):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            address = GatewayAddress(identity)
            try:
                message = decode(frames)
            except ProtocolError as error:
                self._report_garbage(identity, str(error))
                continue
            match message:
                case GatewayHello():
                    self._greet(address, message)
                case Submit():
                    self._take(SubmitReceived(address, message, self._clock()), message.request_id)
                case Embed():
                    self._take(EmbedReceived(address, message, self._clock()), message.request_id)
                case ResetPrefixCache():
                    self._inbox.put(PrefixCacheReset())
                case Abort():
                    self._inbox.put(AbortReceived(address, message.request_ids))
                case _:
                    self._report_garbage(identity, f"a {type(message).__name__} is not for engines")

    def _report_garbage(self, identity: bytes, problem: str) -> None:
        """One line for the first message and for each thousandth: a broken peer must not fill the log."""
        if self._num_garbage % 1000 == 0:
            logger.warning(
                "message from %r dropped (number %d): %s", identity, self._num_garbage + 1, problem
            )
        self._num_garbage += 1

    def _greet(self, address: GatewayAddress, hello: GatewayHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            logger.error(
                "gateway %.64s speaks protocol version %d, this engine %d; upgrade the older one",
                hello.gateway_id,
                hello.protocol_version,
                PROTOCOL_VERSION,
            )
            # Our version is in the answer, so that the gateway can say why it is not served.
            answer = self._hello_to(GatewayHello(PROTOCOL_VERSION, hello.gateway_id))
            self._try_send(address, encode(answer))
            return
        if address in self._gateways:
            # The same name on a new connection: answers between the two may be lost, so it starts anew.
            self._forget(address, "has reconnected")
        self._gateways[address] = _Gateway(hello.gateway_id)
        logger.info("gateway %.64s connected", hello.gateway_id)
        self._send(address, encode(self._hello_to(hello)))
        if self._farewell is not None:
            self._send(address, self._farewell)

    def _take(self, event: SubmitReceived | EmbedReceived, request_id: RequestId) -> None:
        if event.gateway not in self._gateways:
            # It spoke to an earlier life of this engine, or was forgotten: it must say hello again.
            message = "this engine has not had your hello"
            self._try_send(event.gateway, _reject(request_id, "internal_error", message))
        elif not self._inbox.offer(event):
            self._send(event.gateway, _reject(request_id, "queue_full", "the engine's inbox is full"))


def _reject(request_id: RequestId, code: RejectCode, message: str) -> list[bytes]:
    return encode(Reject(request_id, code, message))
