"""One request for vectors in the gateway, before an engine that misbehaves. The real ones do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry import trace

from gateway.balancer import Choice
from gateway.embedding import Embedding, EmbeddingPlan
from gateway.engine_link import EngineLostError, EngineRejectedError
from gateway.errors import ApiError
from gateway.mailbox import VectorMailbox
from shared.identifiers import EngineId, RequestId, TenantId
from shared.messages import Embed, Embedded, EngineLoad, Reject, RejectCode

LOAD = EngineLoad(0, 0, 0, 0, 0)
PLAN = EmbeddingPlan([[1, 2], [3]], dim=2, shortens=False, tenant=TenantId("t"), priority=1)
Behaviour = Callable[[Embed, VectorMailbox], None]


class Engines:
    """Stands for Placement and its links: each behaviour is that of one engine, in the order of choice."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self._behaviours = list(behaviours)
        self.choice = Choice(EngineId("e"), "only")
        self.link = self
        self.aborted: list[RequestId] = []
        self.asked: list[Embed] = []

    def choose(self, prefix_hash: str | None, cost_tokens: int) -> Engines:
        assert (prefix_hash, cost_tokens) == (None, 3)
        return self

    def may_move(self, error: EngineLostError) -> bool:
        return bool(self._behaviours) and not error.by_a_step

    def embed(self, message: Embed, mailbox: VectorMailbox) -> None:
        self.asked.append(message)
        self._behaviours.pop(0)(message, mailbox)

    def abort(self, request_ids: list[RequestId]) -> None:
        self.aborted += request_ids


def answers(vectors: bytes, dim: int = 2) -> Behaviour:
    return lambda message, mailbox: mailbox.put(Embedded(message.request_id, vectors, dim, LOAD))


def fails(error: Exception) -> Behaviour:
    return lambda _, mailbox: mailbox.fail(error)


def rejects(code: RejectCode) -> Behaviour:
    return lambda message, mailbox: mailbox.fail(EngineRejectedError(Reject(message.request_id, code, "no")))


def embedding(engines: Engines, timeout_s: float = 5.0) -> Embedding:
    return Embedding(PLAN, engines, trace.INVALID_SPAN, timeout_s)  # type: ignore[arg-type]


async def refusal_of(engines: Engines, timeout_s: float = 5.0) -> ApiError:
    request = embedding(engines, timeout_s)
    request.start()
    with pytest.raises(ApiError) as caught:
        await request.vectors()
    return caught.value


async def test_the_bytes_are_divided_among_the_texts() -> None:
    engines = Engines(answers(bytes(range(16))))
    request = embedding(engines)
    request.start()
    assert [bytes(vector) for vector in await request.vectors()] == [bytes(range(8)), bytes(range(8, 16))]
    assert (engines.asked[0].dimensions, engines.asked[0].timeout_s) == (None, 5.0)


@pytest.mark.parametrize("answer", [answers(bytes(15)), answers(bytes(8)), answers(bytes(16), dim=4)])
async def test_an_answer_of_another_size_is_an_error_and_not_given_out(answer: Behaviour) -> None:
    assert (await refusal_of(Engines(answer))).status == 502


@pytest.mark.parametrize("loss", [fails(EngineLostError("lost")), rejects("draining")])
async def test_what_an_engine_gives_back_goes_to_the_next_one_under_a_new_name(loss: Behaviour) -> None:
    engines = Engines(loss, answers(bytes(16)))
    request = embedding(engines)
    request.start()
    assert len(await request.vectors()) == 2
    first, second = engines.asked
    assert first.token_id_lists == second.token_id_lists
    assert first.request_id != second.request_id
    request.close()
    assert engines.aborted == [second.request_id]


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        (fails(EngineLostError("lost", by_a_step=True)), 502),
        (rejects("queue_full"), 429),
        (rejects("timed_out"), 504),
        (rejects("internal_error"), 502),
        (rejects("invalid_request"), 400),
    ],
)
async def test_what_would_be_no_better_elsewhere_is_not_moved(behaviour: Behaviour, status: int) -> None:
    engines = Engines(behaviour, answers(bytes(16)))
    assert (await refusal_of(engines)).status == status
    assert len(engines.asked) == 1


async def test_an_engine_that_says_nothing_is_not_waited_for_without_end() -> None:
    assert (await refusal_of(Engines(lambda *_: None), timeout_s=0.01)).status == 504


async def test_of_two_answers_the_first_one_counts() -> None:
    mailbox = VectorMailbox()
    mailbox.fail(EngineLostError("lost"))
    mailbox.put(Embedded(RequestId("r"), b"", 0, LOAD))
    with pytest.raises(EngineLostError):
        await mailbox.take()
