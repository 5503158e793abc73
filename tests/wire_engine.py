"""Engines of which only the wire is real: they register, greet gateways, and say what a test has them say."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import zmq

from engine_service.fake_model import load_fake_model
from engine_service.registry import Registry
from shared.config import ModelConfig
from shared.identifiers import EngineEpoch, EngineId, RequestId
from shared.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineHello,
    EngineLoad,
    GatewayHello,
    Heartbeat,
    ModelCard,
    SequenceUpdate,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.redis_client import connect
from shared.redis_schema import EngineRecord, RedisKeys
from shared.text_bundle import TextBundle

HEARTBEAT_INTERVAL_S = 0.5


class WireEngine(ABC):
    """Of one process or thread: `turn` is called again and again by the one that made it, and `close` once.

    Who derives from it says what follows a `Submit`, and, if it likes, an `Abort`.
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
    ) -> None:
        """The text bundle and the card of the fake model, unless others are given."""
        served = load_fake_model(ModelConfig(name=model, source="fake:", max_model_len=max_model_len))
        self._epoch = EngineEpoch(type(self).__name__)
        engine_id = EngineId(f"{model}-0")
        self._hello = EngineHello(
            PROTOCOL_VERSION,
            engine_id,
            self._epoch,
            card or served.card,
            type(self).__name__,
            text_bundle or served.text_bundle,
        )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self._gateways: set[bytes] = set()
        self._next_heartbeat_s = 0.0
        self.num_steps = 0
        record = EngineRecord(engine_id, self._epoch, address, model, "ready", 0)
        self._registry = Registry(connect(redis_url, 2000), keys, lambda: record)
        self._registry.start()

    def close(self) -> None:
        self._registry.stop()
        self._socket.close(linger=0)
        self._context.term()

    def poll(self, timeout_ms: int) -> bool:
        """Whether something has come within that time."""
        return bool(self._socket.poll(timeout_ms))

    def receive(self) -> None:
        """Waits for a message."""
        gateway, *frames = self._socket.recv_multipart()
        match decode(frames):
            case GatewayHello():
                self._gateways.add(gateway)
                self._socket.send_multipart([gateway, *encode(self._hello)])
            case Submit() as submit:
                self.on_submit(gateway, submit)
            case Abort() as abort:
                self.on_abort(gateway, abort.request_ids)

    @abstractmethod
    def on_submit(self, gateway: bytes, submit: Submit) -> None: ...

    def on_abort(self, gateway: bytes, request_ids: Sequence[RequestId]) -> None:  # noqa: B027 - not abstract
        """Nothing, unless told otherwise."""

    def say(self, gateway: bytes, updates: list[SequenceUpdate], num_running: int = 0) -> None:
        self._socket.send_multipart([gateway, *encode(StepResult(updates, self._load(num_running)))])

    def beat(self) -> None:
        """A sign of life for every gateway, if it is time for one."""
        if (now_s := time.monotonic()) < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_INTERVAL_S
        for gateway in self._gateways:
            self._socket.send_multipart([gateway, *encode(Heartbeat(self._epoch, self._load(0)))])

    def _load(self, num_running: int) -> EngineLoad:
        return EngineLoad(num_running, 0, 1000, 1000, 0, num_steps=self.num_steps)
