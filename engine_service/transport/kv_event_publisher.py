"""KV events on the wire, as vLLM sends them: a PUB socket, and a ROUTER for what a subscriber missed.

    step loop -> PUSH/PULL -> publisher thread -> PUB     frames: topic, sequence number, batch
                                    ^-> ROUTER    asked: "", first number; answers: "", number, batch

Sequence numbers are 8 bytes, big-endian, and start at 0 with each life of the engine. One that is missing
was dropped: on the way to a slow subscriber, where a replay brings it back, or before it was ever sent,
where the replay lacks it too. Then a subscriber has to drop its view of this engine. The same holds for a
number lower than expected: the engine has been restarted, with an empty cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from engine_service.kv_events import KvEvent, KvEventBatch
from shared.engine_endpoint import listen, remove_socket_file
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_QUEUED_BATCHES = 10_000  # on the way to the publisher thread, and to each subscriber
NUM_REPLAYABLE_BATCHES = 10_000
_SEQUENCE_BYTES = 8
_MAX_BATCHES_PER_TURN = 200  # before replays get their turn
_MAX_REQUEST_BYTES = 1024
_DATA_PARALLEL_RANK = 0  # engines are not ranks of one another
_LINGER_MS = 1000
_STOP_TIMEOUT_S = 2.0
_STOP_FRAMES = [b"stop"]


class KvEventPublisher:
    """Owns both sockets. Never makes the engine wait: at its bounds it drops batches, and counts them.

    `publish` belongs to the thread that steps, everything else to the one that made the publisher.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        max_queued_batches: int = MAX_QUEUED_BATCHES,
        num_replayable_batches: int = NUM_REPLAYABLE_BATCHES,
        on_failed: Callable[[BaseException], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Binds the sockets; raises ConfigError. `on_failed` is called by the publisher thread."""
        self.num_dropped = 0
        self._topic = topic.encode()
        self._on_failed = on_failed
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._next_sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=num_replayable_batches)  # newest last
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, max_queued_batches)
        self._pub.setsockopt(zmq.LINGER, _LINGER_MS)
        self.endpoint = listen(self._pub, endpoint, "kv_events_endpoint")
        self._router: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            self._router = context.socket(zmq.ROUTER)
            # Two whole replays. A peer that asks on without reading loses frames, the last one among them.
            self._router.setsockopt(zmq.SNDHWM, 2 * (num_replayable_batches + 1))
            self._router.setsockopt(zmq.RCVHWM, 1000)
            self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            self._router.setsockopt(zmq.LINGER, _LINGER_MS)
            try:
                self.replay_endpoint = listen(self._router, replay_endpoint, "kv_events_replay_endpoint")
            except ConfigError:
                remove_socket_file(self.endpoint)
                raise
        self._pull = context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, 1)  # in one process the bounds of both ends add up
        self._pull.bind(f"inproc://kv-events-{id(self)}")
        self._push = self._connect(context, max_queued_batches)
        self._stop = self._connect(context, 1)
        self._thread = threading.Thread(target=self._run_guarded, name="kv-events", daemon=True)

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], send_high_water_mark: int
    ) -> zmq.Socket[bytes]:
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, send_high_water_mark)
        push.setsockopt(zmq.LINGER, 0)
        push.connect(f"inproc://kv-events-{id(self)}")
        return push

    def start(self) -> None:
        """From now on the sockets are the publisher thread's."""
        self._thread.start()
        logger.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint)

    def publish(self, events: list[KvEvent]) -> None:
        """Queues a batch; drops it when the queue is full, which takes its number all the same."""
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        # Encoded here, and not in the thread: some microseconds, against events that nobody may change.
        payload = self._encoder.encode(KvEventBatch(self._clock(), events, _DATA_PARALLEL_RANK))
        try:
            self._push.send_multipart([sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload], zmq.NOBLOCK)
        except zmq.Again:
            if self.num_dropped % 1000 == 0:
                logger.warning("the queue of KV events is full; batch %d is dropped", sequence)
            self.num_dropped += 1

    def close(self) -> None:
        """Sends what is queued, ends the thread and removes the socket files. `publish` is over by now."""
        if self._thread.is_alive():
            self._stop.send_multipart(_STOP_FRAMES)
            self._thread.join(_STOP_TIMEOUT_S)
        elif self._thread.ident is None:  # never started: the sockets are still this thread's
            self._close_sockets()
        self._push.close()
        self._stop.close()
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None:
                remove_socket_file(endpoint)

    # ------------------------------------------------------------------ the publisher thread

    def _run_guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # whatever it is: an engine that no longer says what it holds misleads
            logger.critical("the KV event thread failed", exc_info=True)
            self._on_failed(error)
        finally:
            self._close_sockets()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        stopping = False
        while not stopping:
            ready = dict(poller.poll())
            if self._pull in ready:
                stopping = self._send_queued()
            if self._router is not None and self._router in ready:
                self._replay_once(self._router)
        while not self._send_queued(until_empty=True):
            pass

    def _send_queued(self, *, until_empty: bool = False) -> bool:
        """Sends some batches; True when told to stop or, with `until_empty`, when none is left."""
        for _ in range(_MAX_BATCHES_PER_TURN):
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return until_empty
            if frames == _STOP_FRAMES:
                return True
            sequence, payload = frames
            self._sent.append((int.from_bytes(sequence, "big"), payload))
            self._pub.send_multipart([self._topic, sequence, payload])  # drops for those that are full
        return False

    def _replay_once(self, router: zmq.Socket[bytes]) -> None:
        """Answers one request: all kept batches from the number that is asked for, then the end marker."""
        frames = router.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            logger.debug("no replay request: %r", frames)
            return
        address, delimiter, first = frames
        first_sequence = int.from_bytes(first, "big")
        for sequence, payload in self._sent:
            if sequence >= first_sequence:
                router.send_multipart(
                    [address, delimiter, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload]
                )
        router.send_multipart([address, delimiter, END_OF_REPLAY, b""])

    def _close_sockets(self) -> None:
        self._pull.close()
        self._pub.close()
        if self._router is not None:
            self._router.close()
