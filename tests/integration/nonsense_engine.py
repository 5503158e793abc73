"""An engine of which only the wire is real: behind its first token it says one that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from engine_service.fake_model import load_fake_model
from engine_service.registry import Registry
from shared.config import ModelConfig
from shared.identifiers import EngineEpoch, EngineId, RequestId
from shared.messages import (
    PROTOCOL_VERSION,
    EngineHello,
    EngineLoad,
    GatewayHello,
    Heartbeat,
    SequenceUpdate,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.redis_client import connect
from shared.redis_schema import EngineRecord, RedisKeys

EPOCH = EngineEpoch("nonsense")
NO_TOKEN = -1


@contextmanager
def nonsense_engine(address: str, redis_url: str, keys: RedisKeys, model: str) -> Iterator[None]:
    engine_id = EngineId(f"{model}-0")
    record = EngineRecord(engine_id, EPOCH, address, model, "ready", 0)
    registry = Registry(connect(redis_url, 2000), keys, lambda: record)
    is_over = threading.Event()
    thread = threading.Thread(target=_serve, args=(address, engine_id, model, is_over))
    thread.start()
    registry.start()
    try:
        yield
    finally:
        registry.stop()
        is_over.set()
        thread.join()


def _serve(address: str, engine_id: EngineId, model: str, is_over: threading.Event) -> None:
    served = load_fake_model(ModelConfig(name=model, source="fake:"))
    hello = EngineHello(PROTOCOL_VERSION, engine_id, EPOCH, served.card, "nonsense", served.text_bundle)
    load = EngineLoad(0, 0, 1000, 1000, 0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        gateways: set[bytes] = set()
        begun: list[tuple[bytes, RequestId]] = []  # whose first token has been said, and had time to arrive
        while not is_over.is_set():
            if not socket.poll(200):
                for gateway in gateways:
                    socket.send_multipart([gateway, *encode(Heartbeat(EPOCH, load))])
                for gateway, request_id in begun:
                    nonsense = StepResult([SequenceUpdate(request_id, [NO_TOKEN])], load)
                    socket.send_multipart([gateway, *encode(nonsense)])
                begun.clear()
                continue
            gateway, *frames = socket.recv_multipart()
            match decode(frames):
                case GatewayHello():
                    gateways.add(gateway)
                    socket.send_multipart([gateway, *encode(hello)])
                case Submit(request_id=request_id):
                    first = StepResult([SequenceUpdate(request_id, [ord("x")])], load)
                    socket.send_multipart([gateway, *encode(first)])
                    begun.append((gateway, request_id))
