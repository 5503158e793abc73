"""KV events over real sockets: numbers, gaps, replay, and an engine process that publishes them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine_service.block_pool import chained_hash, root_hash
from engine_service.kv_events import (
    MEDIUM_COMPUTE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from engine_service.sequence import BlockHash
from engine_service.transport.kv_event_publisher import END_OF_REPLAY, KvEventPublisher
from shared.config import ModelConfig, parse_config
from shared.errors import ConfigError
from tests.integration.engine_peer import TIMEOUT_S, engine, peer, stop, wait_until

Context = zmq.Context[zmq.Socket[bytes]]


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass
class Subscriber:
    """A router's end: applies batches in order, and asks for those that it has missed."""

    sub: zmq.Socket[bytes]
    replay: zmq.Socket[bytes]
    next_sequence: int = 0
    hashes: set[BlockHash] = field(default_factory=set)
    topics: set[bytes] = field(default_factory=set)
    num_replayed: int = 0
    lost: list[int] = field(default_factory=list)

    def receive(self) -> int:
        """Takes one message in, after what is missing before it; returns its number."""
        assert self.sub.poll(int(TIMEOUT_S * 1000)), "no event came"
        topic, number, payload = self.sub.recv_multipart()
        self.topics.add(topic)
        sequence = int.from_bytes(number, "big")
        if sequence > self.next_sequence:
            for missed, missed_payload in self.replay_from(self.next_sequence):
                if missed < sequence:
                    self.num_replayed += 1
                    self._apply(missed, missed_payload)
        if sequence >= self.next_sequence:
            self._apply(sequence, payload)
        return sequence

    def catch_up(self) -> None:
        """Takes in all that was sent so far, as one who comes late does."""
        for sequence, payload in self.replay_from(self.next_sequence):
            self._apply(sequence, payload)

    def replay_from(self, sequence: int) -> list[tuple[int, bytes]]:
        self.replay.send_multipart([b"", sequence.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.replay.poll(int(TIMEOUT_S * 1000)), "the replay does not end"
            delimiter, number, payload = self.replay.recv_multipart()
            assert delimiter == b""
            if number == END_OF_REPLAY:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def _apply(self, sequence: int, payload: bytes) -> None:
        self.lost += range(self.next_sequence, sequence)
        self.next_sequence = sequence + 1
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert abs(batch.ts - time.time()) < 60
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    self.hashes.update(event.block_hashes)
                case BlockRemoved():
                    self.hashes.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.hashes.clear()


@contextlib.contextmanager
def subscriber(endpoint: str, replay_endpoint: str, *, topic: bytes = b"") -> Iterator[Subscriber]:
    context: Context = zmq.Context()
    sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    sub.setsockopt(zmq.SUBSCRIBE, topic)
    sub.connect(endpoint)
    replay.connect(replay_endpoint)
    try:
        yield Subscriber(sub, replay)
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def publisher(*, is_started: bool = True, **options: Any) -> Iterator[KvEventPublisher]:
    context: Context = zmq.Context()
    options = {"replay_endpoint": "tcp://127.0.0.1:0", **options}
    try:
        made = KvEventPublisher(context, options.pop("endpoint", "tcp://127.0.0.1:0"), **options)
        if is_started:
            made.start()
        try:
            yield made
        finally:
            made.close()
    finally:
        context.destroy(linger=0)


def subscriber_of(made: KvEventPublisher, **options: Any) -> contextlib.AbstractContextManager[Subscriber]:
    assert made.replay_endpoint is not None
    return subscriber(made.endpoint, made.replay_endpoint, **options)


def hash_of(number: int) -> BlockHash:
    return chained_hash(root_hash(""), [number])


def stored(number: int) -> list[KvEvent]:
    return [BlockStored([hash_of(number)], None, [number], 1, None, MEDIUM_COMPUTE, None)]


def hashes(*numbers: int) -> set[BlockHash]:
    return {hash_of(number) for number in numbers}


def wait_for_subscription(made: KvEventPublisher, listener: Subscriber, number: int = 0) -> int:
    """Publishes until something comes, since a PUB socket tells nobody who has connected.

    Returns the number of the next batch.
    """
    while True:
        made.publish(stored(number))
        number += 1
        if listener.sub.poll(20):
            return number


def test_batches_come_in_order_under_the_topic_and_begin_with_number_0() -> None:
    with publisher(topic="kv@engine") as made, subscriber_of(made, topic=b"kv@") as listener:
        count = wait_for_subscription(made, listener)
        made.publish([BlockRemoved([hash_of(0)], MEDIUM_COMPUTE)])
        while listener.receive() < count:
            pass
        assert listener.hashes == hashes(*range(1, count))
        assert listener.topics == {b"kv@engine"}
        assert listener.lost == []
        assert listener.replay_from(0)[0][0] == 0


def test_one_who_comes_late_gets_everything_by_replay() -> None:
    with publisher() as made, subscriber_of(made) as listener:
        for number in range(10):
            made.publish(stored(number))
        wait_until(lambda: len(listener.replay_from(0)) == 10)
        listener.catch_up()
        assert listener.hashes == hashes(*range(10))
        assert [number for number, _ in listener.replay_from(7)] == [7, 8, 9]
        assert listener.replay_from(10) == []
        assert listener.replay_from(2**64 - 1) == []


def test_a_gap_is_noticed_and_replayed() -> None:
    with publisher() as made, subscriber_of(made) as listener:
        count = wait_for_subscription(made, listener)
        while listener.receive() < count - 1:
            pass
        made.publish(stored(count))
        made.publish(stored(count + 1))
        made.publish([BlockRemoved([hash_of(count)], MEDIUM_COMPUTE)])
        for _ in range(2):  # lost on the way
            assert listener.sub.poll(int(TIMEOUT_S * 1000))
            listener.sub.recv_multipart()
        replayed_before = listener.num_replayed
        assert listener.receive() == count + 2
        assert listener.num_replayed == replayed_before + 2
        assert listener.hashes == hashes(*range(count), count + 1)
        assert listener.lost == []


def test_what_has_left_the_ring_is_seen_to_be_lost() -> None:
    with publisher(num_replayable_batches=3) as made, subscriber_of(made) as listener:
        for number in range(10):
            made.publish(stored(number))
        wait_until(lambda: [number for number, _ in listener.replay_from(0)] == [7, 8, 9])
        listener.catch_up()
        assert listener.lost == list(range(7))


def test_a_full_queue_drops_and_counts_and_the_numbers_show_it() -> None:
    with publisher(max_queued_batches=10, is_started=False) as made:
        for number in range(50):
            made.publish(stored(number))
        assert 30 <= made.num_dropped <= 40  # the bounds of both ends of the queue add up
        made.start()
        with subscriber_of(made) as listener:
            wait_until(lambda: len(listener.replay_from(0)) == 50 - made.num_dropped)
            first_lost, numbers = 50 - made.num_dropped, itertools.count(50)

            def is_taken() -> bool:
                """What has been sent frees its place in the queue a moment later."""
                num_dropped = made.num_dropped
                made.publish(stored(next(numbers)))
                return made.num_dropped == num_dropped

            wait_until(is_taken)
            last = next(numbers) - 1
            wait_until(lambda: listener.replay_from(last) != [])
            listener.catch_up()
            assert listener.next_sequence == last + 1
            assert listener.lost == list(range(first_lost, last))


@pytest.mark.parametrize("frames", [[b""], [b"", b"short"], [b"", b"12345678", b"more"], [b"12345678"]])
def test_a_request_that_is_none_gets_no_answer_and_does_no_harm(frames: list[bytes]) -> None:
    with publisher() as made, subscriber_of(made) as listener:
        listener.replay.send_multipart(frames)
        made.publish(stored(0))
        wait_until(lambda: len(listener.replay_from(0)) == 1)


def test_closing_sends_what_is_queued_and_removes_the_socket_files(tmp_path: Path) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with publisher(endpoint=endpoint, replay_endpoint=replay_endpoint) as made:
        with subscriber_of(made) as listener:
            count = wait_for_subscription(made, listener)
            while listener.receive() < count - 1:
                pass
            for number in range(count, count + 500):
                made.publish(stored(number))
            made.close()
            while listener.receive() < count + 499:
                pass
            assert listener.next_sequence == count + 500
        assert list(tmp_path.iterdir()) == []


def test_a_wrong_endpoint_is_told_by_the_name_of_its_key(tmp_path: Path) -> None:
    for options, field_name in (
        ({"endpoint": "udp://x"}, "kv_events_endpoint"),
        (
            {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": "tcp://localhost"},
            "kv_events_replay_endpoint",
        ),
    ):
        with pytest.raises(ConfigError) as raised, publisher(**options):
            pass
        assert raised.value.param == field_name
    assert list(tmp_path.iterdir()) == []


def test_several_engines_need_endpoints_that_differ() -> None:
    model = {"name": "m", "source": "fake:", "engines": 2}
    shared = {"kv_events_endpoint": "tcp://127.0.0.1:5557"}
    with pytest.raises(ConfigError, match="engine_id"):
        parse_config({"models": [model | shared]})
    own = {"kv_events_endpoint": "ipc:///run/{engine_id}.events"}
    parse_config({"models": [model | own]})
    with pytest.raises(ConfigError, match="no use without kv_events_endpoint"):
        parse_config({"models": [model | {"kv_events_replay_endpoint": "tcp://127.0.0.1:5558"}]})
    assert ModelConfig(name="m", source="fake:").kv_events_endpoint is None


def test_an_engine_process_publishes_what_its_cache_holds_and_a_restart_begins_at_0(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    config = tmp_path / "headrace.toml"
    config.write_text(
        '[[models]]\nname = "m"\nsource = "fake:"\nblock_size = 4\n'
        f'kv_events_endpoint = "ipc://{tmp_path}/{{engine_id}}.events"\n'
        f'kv_events_replay_endpoint = "ipc://{tmp_path}/{{engine_id}}.replay"\n'
        'kv_events_topic = "kv@{engine_id}"\n'
    )
    flags = ("--config", str(config), "--model", "m", "--engine-id", "m-0")
    prompt = [65, 66, 67, 68, 69]
    for _ in range(2):
        with (
            engine(address, *flags, source=None) as process,
            peer(address) as gateway,
            subscriber(f"ipc://{tmp_path}/m-0.events", f"ipc://{tmp_path}/m-0.replay") as listener,
        ):
            gateway.hello()
            gateway.submit("r", prompt, max_tokens=1)
            gateway.wait_until_finished("r")
            wait_until(lambda listener=listener: listener.replay_from(0) != [])
            listener.catch_up()
            assert listener.next_sequence == 1
            assert listener.lost == []
            assert listener.hashes == {chained_hash(root_hash(""), prompt[:4])}
            assert stop(process) == 0
        assert [path for path in tmp_path.iterdir() if path != config] == []
