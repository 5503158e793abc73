"""The embedding engine: which texts go through together, who comes first, and what is never computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_service.embedding_engine import EmbeddingEngine, PassOutcome
from engine_service.fair_share import FairShare
from engine_service.fake_embedder import FakeEmbedder
from engine_service.refusal import Refusal
from engine_service.scheduling_policy import FirstComeFirstServed
from engine_service.served_embedder import make_card
from shared.config import ModelConfig
from shared.identifiers import RequestId, TenantId
from shared.messages import Embed, Embedded

DIM = 6
FAKE = FakeEmbedder(DIM)


class RecordingEmbedder(FakeEmbedder):
    """Keeps what each pass was given."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.passes: list[list[list[int]]] = []

    def vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        self.passes.append([list(text) for text in texts])
        return super().vectors(texts)


class World:
    """An engine on a clock that stands still unless it is moved."""

    def __init__(self, *, policy: str = "fair_share", **fields: Any) -> None:
        self.now_s = 100.0
        self.embedder = RecordingEmbedder()
        config = ModelConfig(name="m", source="fake:", runner="pooling", is_matryoshka=True, **fields)
        card = make_card(
            config,
            architecture="Fake",
            vocab_size=100,
            max_model_len=50,
            embedding_dim=DIM,
            matryoshka_dimensions=None,
        )
        queue_policy = (
            FirstComeFirstServed() if policy == "fcfs" else FairShare(lambda: self.now_s, ageing_s=10)
        )
        self.engine = EmbeddingEngine(self.embedder, card, config, queue_policy, lambda: self.now_s)
        self.answers: dict[str, Embedded] = {}

    def add(self, name: str, texts: list[list[int]], *, tenant: str = "t", **fields: Any) -> Embed:
        embed = Embed(RequestId(name), texts, TenantId(tenant), **fields)
        self.engine.add(embed, self.now_s)
        self.engine.check()
        return embed

    def step(self, *aborts: str) -> PassOutcome:
        """One pass; the aborts come while it computes."""
        assert self.engine.schedule()
        self.engine.check()
        outcome = self.engine.compute(lambda: [RequestId(name) for name in aborts])
        self.engine.check()
        self.answers |= {embedded.request_id: embedded for embedded in outcome.embedded}
        return outcome

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.outstanding_tokens) == (0, 0, 0)


def vectors_of(embedded: Embedded) -> NDArray[np.float32]:
    return np.frombuffer(embedded.vectors, dtype="<f4").reshape(-1, embedded.dim)


def expected(texts: list[list[int]]) -> NDArray[np.float32]:
    return np.stack([FAKE.vector(text) for text in texts])


def refusal_of(world: World, texts: list[list[int]], **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        world.add("refused", texts, **fields)
    return caught.value


def test_requests_that_wait_share_a_pass_up_to_the_token_budget() -> None:
    world = World(max_num_batched_tokens=10)
    requests = {name: [[index, 2, 3], [index, 5]] for index, name in enumerate("abc")}
    for name, texts in requests.items():
        world.add(name, texts)
    outcome = world.step()
    assert [embedded.request_id for embedded in outcome.embedded] == ["a", "b"]
    assert world.engine.load().num_waiting == 1
    world.run()
    assert [len(texts) for texts in world.embedder.passes] == [4, 2]
    for name, texts in requests.items():
        np.testing.assert_array_equal(vectors_of(world.answers[name]), expected(texts))


def test_a_pass_has_at_most_max_num_seqs_texts_and_a_text_beyond_the_budget_goes_alone() -> None:
    world = World(max_num_batched_tokens=20, max_num_seqs=3)
    world.add("r", [[1], [2], [3], [4], [5] * 30, [6]])
    world.run()
    assert [[len(text) for text in texts] for texts in world.embedder.passes] == [[1, 1, 1], [1], [30], [1]]


def test_a_request_larger_than_a_pass_is_answered_once_and_in_order() -> None:
    texts = [[number % 100, number // 3] for number in range(50)]
    world = World(max_num_batched_tokens=7)
    world.add("large", texts)
    assert world.step().embedded == []
    assert world.engine.load().outstanding_tokens == 100 - 6
    world.run()
    np.testing.assert_array_equal(vectors_of(world.answers["large"]), expected(texts))
    assert world.engine.load().prompt_tokens == 100


def test_one_that_asks_for_little_does_not_wait_for_another_tenants_thousands() -> None:
    world = World(max_num_batched_tokens=8)
    world.add("bulk", [[1, 2]] * 1000, tenant="bulk")
    world.step()
    world.add("small", [[3, 4]], tenant="small")
    assert [embedded.request_id for embedded in world.step().embedded] == ["small"]


def test_a_tenant_whose_requests_have_ended_does_not_count_as_one_that_waits() -> None:
    """Else one that comes later would be lifted to its counter, and share with it from the start."""
    world = World(max_num_seqs=1)
    world.add("served before", [[1, 2]] * 5, tenant="a")
    world.run()
    world.add("new", [[3, 4]] * 3, tenant="b")
    world.add("again", [[5, 6]], tenant="a")
    world.run()
    assert list(world.answers) == ["served before", "new", "again"]


def test_an_urgent_class_goes_first_also_when_a_large_request_has_been_served_for_long() -> None:
    world = World(max_num_batched_tokens=8)
    world.add("bulk", [[1, 2]] * 100, tenant="bulk", priority=2)
    for _ in range(5):
        world.step()
        world.now_s += 9  # the bulk gets on, and so does not age into the higher class
    world.add("urgent", [[3, 4]], tenant="urgent", priority=0)
    assert [embedded.request_id for embedded in world.step().embedded] == ["urgent"]


def test_first_come_first_served_keeps_the_order() -> None:
    world = World(policy="fcfs", max_num_batched_tokens=4)
    world.add("first", [[1, 2]] * 5, priority=2)
    world.add("second", [[3, 4]], priority=0)
    world.run()
    assert list(world.answers) == ["first", "second"]


def test_what_was_aborted_or_has_expired_costs_no_pass() -> None:
    world = World(max_num_batched_tokens=100)
    world.add("aborted", [[1]])
    world.add("late", [[2]], timeout_s=5)
    world.add("in time", [[3]], timeout_s=50)
    assert world.engine.abort(RequestId("aborted")) is not None
    assert world.engine.abort(RequestId("aborted")) is None
    world.now_s += 5
    outcome = world.engine.drop_expired()
    [(name, refusal)] = outcome.refusals
    assert (name, refusal.code) == ("late", "timed_out")
    assert [timeline.request_id for timeline in outcome.finished] == ["late"]
    world.run()
    assert world.embedder.passes == [[[3]]]


def test_an_abort_during_a_pass_drops_what_was_computed_and_its_name_is_free_again() -> None:
    world = World(max_num_batched_tokens=4)
    world.add("r", [[1, 2], [3, 4], [5, 6]])
    outcome = world.step("r", "unknown")
    assert outcome.embedded == []
    assert [timeline.request_id for timeline in outcome.finished] == ["r"]
    assert not world.engine.has_work
    world.add("r", [[7]])
    world.run()
    np.testing.assert_array_equal(vectors_of(world.answers["r"]), expected([[7]]))


def test_vectors_are_shortened_to_length_one_again() -> None:
    world = World()
    world.add("short", [[1, 2], [3]], dimensions=2)
    world.add("whole", [[1, 2], [3]], dimensions=DIM)
    world.run()
    whole, short = vectors_of(world.answers["whole"]), vectors_of(world.answers["short"])
    np.testing.assert_array_equal(whole, expected([[1, 2], [3]]))
    np.testing.assert_allclose(short, whole[:, :2] / np.linalg.norm(whole[:, :2], axis=1)[:, None], rtol=1e-6)


def test_a_vector_that_is_no_number_is_not_given_out_as_one() -> None:
    world = World()
    vectors = world.embedder.vectors

    def with_a_hole(texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        given = vectors(texts)
        given[[text == [7] for text in texts], 0] = np.nan
        return given

    world.embedder.vectors = with_a_hole  # type: ignore[method-assign]
    world.add("bad", [[1], [7], [2]])
    world.add("good", [[1]])
    [(name, refusal)] = world.step().refusals
    assert (name, refusal.code) == ("bad", "internal_error")
    assert "input[1]" in refusal.message
    assert list(world.answers) == ["good"]
    assert not world.engine.has_work


@pytest.mark.parametrize(
    ("texts", "fields", "param"),
    [
        ([], {}, "input"),
        ([[1], []], {}, "input[1]"),
        ([[1] * 51], {}, "input[0]"),
        ([[1], [100]], {}, "input[1]"),
        ([[-1]], {}, "input[0]"),
        ([[1]], {"dimensions": DIM + 1}, "dimensions"),
        ([[1]], {"dimensions": 0}, "dimensions"),
        ([[1]], {"timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    texts: list[list[int]], fields: dict[str, Any], param: str
) -> None:
    world = World()
    assert refusal_of(world, texts, **fields).param == param
    assert not world.engine.has_work


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    world = World(max_queued_requests=2)
    world.add("a", [[1]])
    world.add("b", [[1]])
    assert refusal_of(world, [[1]]).code == "queue_full"
    world = World(max_queued_tokens=5)
    world.add("larger than the bound, with nothing before it", [[1] * 4, [2] * 4])
    assert refusal_of(world, [[1]]).code == "queue_full"
    world.run()
    world.add("next", [[1]])


def test_a_request_id_in_use_is_refused() -> None:
    world = World()
    world.add("refused", [[1]])
    assert refusal_of(world, [[1]]).param == "request_id"


def test_whatever_comes_when_every_request_is_answered_or_aborted() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = World(max_num_batched_tokens=17, max_num_seqs=5)
    sent: dict[str, list[list[int]]] = {}
    aborted: set[str] = set()
    for number in range(150):
        name = f"r{number}"
        sent[name] = [[rng.randrange(100)] * rng.randint(1, 20) for _ in range(rng.randint(1, 9))]
        world.add(name, sent[name], tenant=rng.choice("abc"), priority=rng.randrange(3))
        if rng.random() < 0.2:
            aborted.add(victim := rng.choice([name for name in sent if name not in world.answers]))
            world.engine.abort(RequestId(victim))
        if rng.random() < 0.5 and world.engine.has_work:
            world.step()
        world.now_s += rng.random()
    world.run()
    assert set(world.answers) | aborted == set(sent)
    assert not set(world.answers) & aborted
    for name, embedded in world.answers.items():
        np.testing.assert_array_equal(vectors_of(embedded), expected(sent[name]))
