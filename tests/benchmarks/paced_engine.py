"""An engine that says a token of every stream at a fixed pace, and knows when it did.

So a measurement of the gateway has an engine that takes next to no processor time, is never late by itself
unless the machine is, and knows when it sent the first token of each stream.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection

from loadtest.simulator.wire_engine import WireEngine
from shared.identifiers import RequestId
from shared.messages import SequenceUpdate, Submit
from shared.redis_schema import RedisKeys

TOKEN_IDS = b"the quick brown fox jumps over the lazy dog "


def run(address: str, redis_url: str, namespace: str, step_interval_s: float, control: Connection) -> None:
    """Until anything comes over `control`; then it sends what it has noted over it: by the seed of each
    stream the time, as of time.time_ns, when its first token was sent."""
    engine = PacedEngine(address, redis_url, RedisKeys(namespace), "fake", max_model_len=1_000_000)
    engine.pace(step_interval_s)
    control.send("listening")
    while not control.poll():
        engine.turn()
    control.recv()
    engine.close()
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


class PacedEngine(WireEngine):
    def pace(self, step_interval_s: float) -> None:
        """Before the first turn."""
        self._streams: dict[bytes, dict[RequestId, _Stream]] = defaultdict(dict)  # by gateway
        self._step_interval_s = step_interval_s
        self._next_step_s = time.monotonic()
        self.first_sent_at_ns: dict[int, int] = {}
        self.num_late_steps = 0  # by more than half of the interval: the machine was busy elsewhere

    def turn(self) -> None:
        wait_s = max(0.0, self._next_step_s - time.monotonic())
        if wait_s > 0.001:
            wait_s -= 0.0005  # poll counts in whole milliseconds; the rest is waited for below
            if self.poll(int(wait_s * 1000)):
                self.receive()
                return
        while self.poll(0):
            self.receive()
        if (left_s := self._next_step_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._step()

    def on_submit(self, gateway: bytes, submit: Submit) -> None:
        self._streams[gateway][submit.request_id] = _Stream(submit)

    def on_abort(self, gateway: bytes, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self._streams[gateway].pop(request_id, None)

    def _step(self) -> None:
        now_s = time.monotonic()
        self.num_late_steps += now_s - self._next_step_s > self._step_interval_s / 2
        self._next_step_s = max(self._next_step_s + self._step_interval_s, now_s)
        self.num_steps += 1
        self.num_running = sum(map(len, self._streams.values()))
        self.beat()
        for gateway, streams in self._streams.items():
            if streams:
                self._say_a_token_each(gateway, streams)

    def _say_a_token_each(self, gateway: bytes, streams: dict[RequestId, _Stream]) -> None:
        updates = [stream.next_update(request_id) for request_id, stream in streams.items()]
        now_ns = time.time_ns()
        self.say(gateway, updates)
        for request_id, stream in list(streams.items()):
            if stream.num_tokens == 1:
                self.first_sent_at_ns[stream.seed] = now_ns
            if stream.num_tokens_left == 0:
                del streams[request_id]
