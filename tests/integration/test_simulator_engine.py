"""A simulated engine on its own wire, with a clock that the test moves: what it says, and when."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.simulator.engine import SimulatedEngine
from loadtest.simulator.knobs import parse_knobs
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.identifiers import RequestId, TenantId
from shared.messages import (
    PROTOCOL_VERSION,
    Bye,
    Dead,
    EngineHello,
    EngineLoad,
    FromGateway,
    GatewayHello,
    Reject,
    SequenceUpdate,
    StepResult,
    Submit,
)
from shared.redis_schema import RedisKeys
from shared.sampling import SamplingParams
from tests.integration.engine_peer import Peer, peer

# A step takes a second, whatever is in it.
STEADY = ("step_base_ms=1000", "step_per_sequence_ms=0", "step_per_prefill_token_ms=0")


class World:
    """An engine, a gateway's end of its wire, and the time."""

    def __init__(self, redis_url: str, address: str, knobs: tuple[str, ...], model: dict[str, Any]) -> None:
        self.now_s = 0.0
        self.engine = SimulatedEngine(
            address,
            redis_url,
            RedisKeys(f"test-{uuid.uuid4().hex[:10]}"),
            ModelConfig.model_validate({"name": "simulated", "source": "sim:", **model}),
            parse_knobs([*STEADY, *knobs]),
            clock=lambda: self.now_s,
        )
        self._num_marks = 0

    def connect(self, gateway: Peer) -> None:
        self.peer = gateway
        self.tell(GatewayHello(PROTOCOL_VERSION, gateway.gateway_id))

    def tell(self, message: FromGateway) -> None:
        self.peer.send(message)
        assert self.engine.poll(10_000), "what is sent arrives"
        self.at(self.now_s)

    def at(self, now_s: float) -> None:
        """Moves the clock there, lets the engine do what is due, and waits for all that it then says."""
        self.now_s = now_s
        self.engine.turn(max_wait_s=0)
        self._num_marks += 1
        mark = f"mark {self._num_marks}"
        self.engine.send_to_all(Dead(self.engine.epoch, mark))
        self.peer.wait_for(Dead, lambda dead: dead.reason == mark)

    def submit(self, name: str, max_tokens: int = 5, num_prompt_tokens: int = 3, **fields: Any) -> None:
        sampling = fields.pop("sampling", SamplingParams(max_tokens, seed=1))
        prompt = [65] * num_prompt_tokens
        self.tell(Submit(RequestId(name), prompt, sampling, TenantId("acme"), **fields))

    def num_tokens(self, *names: str) -> list[int]:
        return [len(self.peer.tokens(name)) for name in names]

    @property
    def updates(self) -> list[SequenceUpdate]:
        steps = [message for message in self.peer.messages if isinstance(message, StepResult)]
        return [update for step in steps for update in step.updates]

    @property
    def ends(self) -> Counter[str]:
        return Counter(update.finish_reason for update in self.updates if update.finish_reason is not None)

    @property
    def rejects(self) -> dict[str, str]:
        return {one.request_id: one.code for one in self.peer.messages if isinstance(one, Reject)}

    @property
    def load(self) -> EngineLoad:
        return self.engine.load()


@contextmanager
def world(redis_url: str, directory: Path, *knobs: str, **model: Any) -> Iterator[World]:
    address = f"ipc://{directory}/{uuid.uuid4().hex[:8]}.sock"
    made = World(redis_url, address, knobs, model)
    try:
        with peer(address) as gateway:
            made.connect(gateway)
            yield made
    finally:
        made.engine.close()


def test_tokens_come_when_the_steps_have_ended_that_make_them(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path) as w:
        w.submit("a", max_tokens=3)
        w.at(0.99)
        assert w.num_tokens("a") == [0]
        w.at(1.0)
        assert w.num_tokens("a") == [1]
        w.at(1.5)
        w.submit("b", max_tokens=9)  # waits for the end of the step that is under way
        w.at(2.5)
        assert w.num_tokens("a", "b") == [2, 0]
        assert (w.load.num_running, w.load.num_waiting) == (2, 0)
        w.at(3.0)
        assert w.num_tokens("a", "b") == [3, 1]
        assert w.ends == {"length": 1}


def test_a_step_that_was_late_does_not_delay_those_behind_it_and_is_counted(
    redis_url: str, tmp_path: Path
) -> None:
    with world(redis_url, tmp_path) as w:
        w.submit("a", max_tokens=9)
        w.at(1.0)
        w.at(3.9)  # steps 2 and 3 should have ended at 2 and 3
        assert w.num_tokens("a") == [3]
        w.at(4.0)
        assert w.num_tokens("a") == [4]
        lateness = w.engine.lateness
        assert (lateness.num_steps, lateness.num_late_steps) == (4, 2)
        assert lateness.largest_s == pytest.approx(1.9)


def test_after_idle_time_the_next_step_begins_with_the_request(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path) as w:
        w.submit("a", max_tokens=1)
        w.at(1.0)
        w.at(7.3)
        w.submit("b", max_tokens=1)
        w.at(8.2)
        assert w.num_tokens("b") == [0]
        w.at(8.3)
        assert w.num_tokens("b") == [1]


def test_a_floor_is_waited_for_before_a_request_is_queued(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, "ttft_floor_ms=400") as w:
        w.submit("a", max_tokens=2)
        assert (w.load.num_running, w.load.num_waiting) == (0, 1)
        w.at(1.3)
        assert w.num_tokens("a") == [0]
        w.at(1.4)
        assert w.num_tokens("a") == [1]
        w.at(2.4)
        assert w.num_tokens("a") == [2], "later tokens are not held up"


def test_a_stall_holds_up_the_step_that_is_under_way_and_all_behind_it(
    redis_url: str, tmp_path: Path
) -> None:
    with world(redis_url, tmp_path, "stall_s=10", "stall_after_requests=2") as w:
        w.submit("a", max_tokens=9)
        w.at(1.5)
        w.submit("b", max_tokens=9)
        w.at(11.9)
        assert w.num_tokens("a", "b") == [1, 0]
        w.at(12.0)
        assert w.num_tokens("a", "b") == [2, 0]
        w.at(13.0)
        assert w.num_tokens("a", "b") == [3, 1]


def test_a_stall_of_an_idle_engine_holds_up_whoever_comes(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, "stall_s=5", "stall_at_s=3") as w:
        w.submit("a", max_tokens=1)
        w.at(4.0)
        w.submit("b", max_tokens=1)
        w.at(8.9)
        assert w.num_tokens("a", "b") == [1, 0]
        w.at(9.0)
        assert w.num_tokens("b") == [1]


def test_jitter_moves_steps_and_stays_within_its_share(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, "itl_jitter=0.3") as w:
        w.submit("a", max_tokens=40)
        ends_s: list[float] = []
        while not w.engine.is_idle:
            w.at(w.engine.next_event_s)
            ends_s.append(w.now_s)
    lengths = [later - earlier for earlier, later in itertools.pairwise([0.0, *ends_s])]
    assert len(lengths) == 40
    assert all(0.7 <= length <= 1.3 for length in lengths)
    assert max(lengths) - min(lengths) > 0.4
    assert sum(lengths) / 40 == pytest.approx(1.0, abs=0.1)


def test_several_tokens_come_in_one_message_but_the_first_comes_alone(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, "tokens_per_message=4") as w:
        w.submit("a", max_tokens=10)
        w.at(10.0)
        assert [len(update.new_token_ids) for update in w.updates] == [1, 4, 4, 1]


def test_shares_of_requests_are_refused_or_end_half_way(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, "reject_share=0.2", "abort_share=0.4") as w:
        for number in range(20):
            w.submit(str(number), max_tokens=6)
        w.at(7.0)  # the first began alone, the others a step later
        assert Counter(w.rejects.values()) == {"queue_full": 4}
        assert w.ends == {"abort": 8, "length": 8}
        aborted = [update.request_id for update in w.updates if update.finish_reason == "abort"]
        assert w.num_tokens(*aborted) == [3] * 8
        assert (w.load.num_running, w.load.num_waiting, w.load.outstanding_tokens) == (0, 0, 0)
        assert w.load.num_free_blocks == w.load.num_blocks


def test_counters_of_the_prefix_cache_are_as_declared_and_higher_if_told_so(
    redis_url: str, tmp_path: Path
) -> None:
    with world(redis_url, tmp_path, "prefix_hit_share=0.3", "undeclared_hit_points=20") as w:
        for number in range(10):
            w.submit(str(number), max_tokens=1, num_prompt_tokens=50)
        w.at(5.0)
        assert (w.load.prefix_cache_queries, w.load.prefix_cache_hits) == (500, 250)
        assert (w.load.prompt_tokens, w.load.generation_tokens) == (500, 10)
        assert sum(update.num_cached_tokens for update in w.updates) == 150


def test_blocks_are_held_by_what_runs_and_their_lack_preempts(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, num_gpu_blocks_override=4, block_size=16, max_num_seqs=2) as w:
        w.submit("a", max_tokens=20, num_prompt_tokens=30)
        w.submit("b", max_tokens=20, num_prompt_tokens=30)
        w.at(1.5)  # the step under way brings them to 32 and 31 tokens, and there is no room for two more
        assert (w.load.num_blocks, w.load.num_free_blocks) == (4, 0)
        w.at(60.0)
        assert w.load.num_preemptions == 1
        assert w.ends == {"length": 2}
        assert w.num_tokens("a", "b") == [20, 20]
        assert w.load.num_free_blocks == 4


def test_who_is_aborted_or_whose_time_is_up_gets_nothing_more(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, max_num_seqs=1) as w:
        w.submit("a", max_tokens=9)
        w.submit("slow", max_tokens=9, timeout_s=4.0)
        w.at(2.0)
        w.peer.abort("a")
        assert w.engine.poll(10_000)
        w.at(5.0)
        assert w.num_tokens("a", "slow") == [2, 2]
        assert w.ends == {"abort": 1}
        assert w.engine.is_idle


def test_what_has_no_answer_here_is_refused_with_its_field(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path, max_model_len=8) as w:
        w.submit("scored", sampling=SamplingParams(5, seed=1, logprobs=1))
        w.submit("long", num_prompt_tokens=8)
        w.submit("done", max_tokens=2, output_token_ids=[1, 2])
        assert w.rejects == {
            "scored": "invalid_request",
            "long": "context_length_exceeded",
            "done": "invalid_request",
        }
        w.submit("cut", max_tokens=100, num_prompt_tokens=5)
        w.at(3.0)
        assert (w.num_tokens("cut"), w.ends) == ([3], {"length": 1})


def test_a_draining_engine_ends_what_it_has_and_takes_nothing_new(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path) as w:
        w.submit("a", max_tokens=3)
        w.engine.drain()
        w.submit("b")
        assert not w.engine.is_idle
        w.at(3.0)
        assert any(isinstance(message, Bye) for message in w.peer.messages)
        assert (w.num_tokens("a"), w.rejects, w.engine.is_idle) == ([3], {"b": "draining"}, True)


def test_a_gateway_that_holds_the_text_bundle_is_not_sent_it_again(redis_url: str, tmp_path: Path) -> None:
    with world(redis_url, tmp_path) as w:
        (hello,) = [message for message in w.peer.messages if isinstance(message, EngineHello)]
        assert hello.text_bundle is not None
        assert hello.text_bundle_hash == hello.text_bundle.content_hash
        w.submit("a", max_tokens=9)
        w.tell(GatewayHello(PROTOCOL_VERSION, w.peer.gateway_id, [hello.text_bundle_hash]))
        again = [message for message in w.peer.messages if isinstance(message, EngineHello)][-1]
        assert again.text_bundle is None
        assert w.engine.is_idle, "what an earlier connection had begun has ended with it"


def test_slots_that_do_not_fit_into_a_step_are_refused(redis_url: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="max_step_tokens"),
        world(redis_url, tmp_path, "max_step_tokens=32", max_num_seqs=64),
    ):
        pass
