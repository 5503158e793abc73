"""The wire of an engine without the engine: it registers, greets gateways, and says what it is told to."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import zmq

from shared.byte_text import END_ID, VOCAB_SIZE, byte_text_bundle
from shared.engine_endpoint import advertised_address, bind_router, remove_socket_file
from shared.engine_registry import Registry
from shared.identifiers import EngineEpoch, EngineId, RequestId, fresh_epoch
from shared.messages import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Embed,
    EngineHello,
    EngineLoad,
    FromEngine,
    GatewayHello,
    Heartbeat,
    ModelCard,
    ProtocolError,
    Reject,
    RejectCode,
    SequenceUpdate,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.redis_client import connect
from shared.redis_schema import EngineRecord, EngineState, RedisKeys
from shared.text_bundle import TextBundle

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.5
DEFAULT_MAX_MODEL_LEN = 4096
NUM_BLOCKS = 1000
REDIS_TIMEOUT_MS = 2000
# Messages that a gateway may leave unread. One that leaves more has lost its streams, as with a real engine.
MAX_UNREAD_MESSAGES = 10_000


class WireEngine(ABC):
    """Of one thread: who made it calls `receive` and `beat` again and again, and `close` once.

    Who derives from it says what follows a `Submit`, and, if it likes, an `Abort` and the loss of a gateway.
    """

    def __init__(
        self,
        address: str,
        redis_url: str,
        keys: RedisKeys,
        model: str,
        *,
        text_bundle: TextBundle | None = None,
        card: ModelCard | None = None,
        max_model_len: int | None = None,
        engine_id: EngineId | None = None,
        advertise: str | None = None,
    ) -> None:
        """A model of bytes, unless text bundle and card are given. Raises ConfigError about addresses."""
        self.num_steps = 0
        self.num_running = 0
        self._model = model
        self._epoch = fresh_epoch()
        self._engine_id = engine_id or EngineId(f"{model}-0")
        self._card = card or byte_model_card(model, max_model_len or DEFAULT_MAX_MODEL_LEN)
        self._text_bundle = text_bundle or byte_text_bundle()
        self._text_bundle_hash = self._text_bundle.content_hash
        self._gateways: set[bytes] = set()
        self._next_heartbeat_s = 0.0
        self._told: EngineLoad | None = None  # the registry's thread tells it, too
        self._state: EngineState = "ready"
        self._bound = address
        self._context = zmq.Context()
        try:
            self._socket = bind_router(self._context, address, send_high_water_mark=MAX_UNREAD_MESSAGES)
        except BaseException:
            self._context.term()
            raise
        self.address = advertised_address(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), advertise)
        self._registry = Registry(connect(redis_url, REDIS_TIMEOUT_MS), keys, self._record)
        self._registry.start()

    @property
    def epoch(self) -> EngineEpoch:
        return self._epoch

    def close(self) -> None:
        """What was said still leaves, within the two seconds that the socket lingers."""
        self._registry.stop()
        self._socket.close()
        self._context.term()
        remove_socket_file(self._bound)

    def poll(self, timeout_ms: int) -> bool:
        """Whether something has come within that time."""
        return bool(self._socket.poll(timeout_ms))

    def receive(self) -> None:
        """Waits for a message."""
        gateway, *frames = self._socket.recv_multipart()
        try:
            message = decode(frames)
        except ProtocolError as error:
            logger.warning("message from %r dropped: %s", gateway, error)
            return
        match message:
            case GatewayHello() as hello:
                self._greet(gateway, hello)
            case Submit() | Embed() as request if gateway not in self._gateways:
                # It spoke to an earlier life of this engine: it must say hello again.
                self.reject(
                    gateway, request.request_id, "internal_error", "this engine has not had your hello"
                )
            case Submit() as submit:
                self.on_submit(gateway, submit)
            case Abort() as abort:
                self.on_abort(gateway, abort.request_ids)
            case Embed() as embed:
                self.reject(gateway, embed.request_id, "invalid_request", "this model does not embed")

    @abstractmethod
    def on_submit(self, gateway: bytes, submit: Submit) -> None: ...

    def on_abort(self, gateway: bytes, request_ids: Sequence[RequestId]) -> None:  # noqa: B027 - not abstract
        """Nothing, unless told otherwise."""

    def on_lost(self, gateway: bytes) -> None:  # noqa: B027 - not abstract
        """It will read nothing any more. Nothing, unless told otherwise."""

    def load(self) -> EngineLoad:
        """What steps and heartbeats tell."""
        return EngineLoad(self.num_running, 0, NUM_BLOCKS, NUM_BLOCKS, 0, num_steps=self.num_steps)

    def say(self, gateway: bytes, updates: list[SequenceUpdate]) -> None:
        self._told = self.load()
        self.send(gateway, StepResult(updates, self._told))

    def reject(
        self,
        gateway: bytes,
        request_id: RequestId,
        code: RejectCode,
        message: str,
        param: str | None = None,
    ) -> None:
        self.send(gateway, Reject(request_id, code, message, param))

    def beat(self) -> None:
        """A sign of life for every gateway, if it is time for one."""
        if (now_s := time.monotonic()) < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_INTERVAL_S
        self._told = self.load()
        self.send_to_all(Heartbeat(self._epoch, self._told))

    def say_goodbye(self) -> None:
        """No gateway sends any new request from here on."""
        self._state = "draining"
        self._registry.refresh()
        self.send_to_all(Bye(self._epoch))

    def send_to_all(self, message: FromEngine) -> None:
        for gateway in list(self._gateways):
            self.send(gateway, message)

    def send(self, gateway: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart([gateway, *encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._forget(gateway, "does not read")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(gateway, "is gone")

    def _greet(self, gateway: bytes, hello: GatewayHello) -> None:
        if gateway in self._gateways:
            self._forget(gateway, "has reconnected")
        if hello.protocol_version == PROTOCOL_VERSION:
            self._gateways.add(gateway)
        is_known = self._text_bundle_hash in hello.known_bundles
        self.send(
            gateway,
            EngineHello(
                PROTOCOL_VERSION,
                self._engine_id,
                self._epoch,
                self._card,
                self._text_bundle_hash,
                None if is_known else self._text_bundle,
            ),
        )
        if self._state == "draining":
            self.send(gateway, Bye(self._epoch))

    def _forget(self, gateway: bytes, reason: str) -> None:
        if gateway in self._gateways:
            self._gateways.remove(gateway)
            logger.warning("gateway %.64r %s; its requests are aborted", gateway, reason)
            self.on_lost(gateway)

    def _record(self) -> EngineRecord:
        """For the registry, in whose thread it is made."""
        return EngineRecord(
            self._engine_id, self._epoch, self.address, self._model, self._state, os.getpid(), self._told
        )


def byte_model_card(
    name: str,
    max_model_len: int,
    *,
    vocab_size: int = VOCAB_SIZE,
    max_num_seqs: int = 64,
    block_size: int = 16,
    num_blocks: int = NUM_BLOCKS,
) -> ModelCard:
    """Of a model that has no weights and says bytes."""
    return ModelCard(
        name=name,
        architecture="SimulatedModel",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype="none",
        eos_token_ids=[END_ID],
    )
