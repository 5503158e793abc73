"""An engine of which only the wire is real: it says a token of every stream at a fixed pace, and when it did.

So a measurement of the gateway has an engine that takes next to no processor time, is never late by itself
unless the machine is, and knows when it sent the first token of each stream.
"""

from __future__ import annotations

import time
from collections import defaultdict
from multiprocessing.connection import Connection

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
    SequenceUpdate,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.redis_client import connect
from shared.redis_schema import EngineRecord, RedisKeys

EPOCH = EngineEpoch("paced")
HEARTBEAT_INTERVAL_S = 0.5
TOKEN_IDS = b"the quick brown fox jumps over the lazy dog "


def run(address: str, redis_url: str, namespace: str, step_interval_s: float, control: Connection) -> None:
    """Until anything comes over `control`; then it sends what it has noted over it: by the seed of each
    stream the time, as of time.time_ns, when its first token was sent."""
    engine = _PacedEngine(address, step_interval_s)
    record = EngineRecord(EngineId("fake-0"), EPOCH, address, "fake", "ready", 0)
    registry = Registry(connect(redis_url, 2000), RedisKeys(namespace), lambda: record)
    registry.start()
    control.send("listening")
    while not control.poll():
        engine.turn()
    control.recv()
    registry.stop()
    control.send((engine.first_sent_at_ns, engine.num_late_steps))


class _Stream:
    def __init__(self, submit: Submit) -> None:
        self.seed = submit.sampling.seed
        self.num_tokens_left = submit.sampling.max_tokens
        self.num_tokens = 0

    def next_update(self, request_id: RequestId) -> SequenceUpdate:
        token_id = TOKEN_IDS[self.num_tokens % len(TOKEN_IDS)]
        self.num_tokens += 1
        self.num_tokens_left -= 1
        return SequenceUpdate(request_id, [token_id], None if self.num_tokens_left else "length")


class _PacedEngine:
    def __init__(self, address: str, step_interval_s: float) -> None:
        served = load_fake_model(ModelConfig(name="fake", source="fake:", max_model_len=1_000_000))
        self._hello = EngineHello(
            PROTOCOL_VERSION, EngineId("fake-0"), EPOCH, served.card, "paced", served.text_bundle
        )
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._streams: dict[bytes, dict[RequestId, _Stream]] = defaultdict(dict)  # by gateway
        self._step_interval_s = step_interval_s
        self._next_step_s = time.monotonic()
        self._next_heartbeat_s = 0.0
        self._num_steps = 0
        self.first_sent_at_ns: dict[int, int] = {}
        self.num_late_steps = 0  # by more than half of the interval: the machine was busy elsewhere

    def turn(self) -> None:
        wait_s = max(0.0, self._next_step_s - time.monotonic())
        if wait_s > 0.001:
            wait_s -= 0.0005  # poll counts in whole milliseconds; the rest is waited for below
            if self._socket.poll(int(wait_s * 1000)):
                self._receive()
                return
        while self._socket.poll(0):
            self._receive()
        if (left_s := self._next_step_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._step()

    def _receive(self) -> None:
        gateway, *frames = self._socket.recv_multipart()
        message = decode(frames)
        match message:
            case GatewayHello():
                self._socket.send_multipart([gateway, *encode(self._hello)])
            case Submit():
                self._streams[gateway][message.request_id] = _Stream(message)
            case Abort():
                for request_id in message.request_ids:
                    self._streams[gateway].pop(request_id, None)

    def _step(self) -> None:
        now_s = time.monotonic()
        self.num_late_steps += now_s - self._next_step_s > self._step_interval_s / 2
        self._next_step_s = max(self._next_step_s + self._step_interval_s, now_s)
        self._num_steps += 1
        for gateway, streams in self._streams.items():
            if streams:
                self._say_a_token_each(gateway, streams)
            elif now_s >= self._next_heartbeat_s:
                self._next_heartbeat_s = now_s + HEARTBEAT_INTERVAL_S
                self._socket.send_multipart([gateway, *encode(Heartbeat(EPOCH, self._load(0)))])

    def _say_a_token_each(self, gateway: bytes, streams: dict[RequestId, _Stream]) -> None:
        updates = [stream.next_update(request_id) for request_id, stream in streams.items()]
        frames = encode(StepResult(updates, self._load(len(streams))))
        now_ns = time.time_ns()
        self._socket.send_multipart([gateway, *frames])
        for request_id, stream in list(streams.items()):
            if stream.num_tokens == 1:
                self.first_sent_at_ns[stream.seed] = now_ns
            if stream.num_tokens_left == 0:
                del streams[request_id]

    def _load(self, num_running: int) -> EngineLoad:
        return EngineLoad(num_running, 0, 1000, 1000, 0, num_steps=self._num_steps)
