"""An engine that says, behind the first token of a sequence, one that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.simulator.wire_engine import WireEngine
from shared.identifiers import RequestId
from shared.messages import SequenceUpdate, Submit
from shared.redis_schema import RedisKeys

NO_TOKEN = -1


@contextmanager
def nonsense_engine(address: str, redis_url: str, keys: RedisKeys, model: str) -> Iterator[None]:
    is_over = threading.Event()
    engine = NonsenseEngine(address, redis_url, keys, model)
    thread = threading.Thread(target=engine.serve, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        engine.close()


class NonsenseEngine(WireEngine):
    def serve(self, is_over: threading.Event) -> None:
        # Whose first token has been said, and has had time to arrive when nothing else comes.
        self._begun: list[tuple[bytes, RequestId]] = []
        while not is_over.is_set():
            if self.poll(200):
                self.receive()
                continue
            self.beat()
            for gateway, request_id in self._begun:
                self.say(gateway, [SequenceUpdate(request_id, [NO_TOKEN])])
            self._begun.clear()

    def on_submit(self, gateway: bytes, submit: Submit) -> None:
        self.say(gateway, [SequenceUpdate(submit.request_id, [ord("x")])])
        self._begun.append((gateway, submit.request_id))
