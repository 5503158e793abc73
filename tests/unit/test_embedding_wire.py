"""Messages about embeddings, and peers of an older or newer build."""

from __future__ import annotations

import msgspec
import pytest

from shared.embedding_limits import dim_of
from shared.errors import InvalidRequest
from shared.identifiers import RequestId, TenantId
from shared.messages import (
    Embed,
    Embedded,
    EngineLoad,
    MessageType,
    ModelCard,
    ProtocolError,
    ResetPrefixCache,
    decode,
    encode,
)

LOAD = EngineLoad(1, 2, 0, 0, 30)


@pytest.mark.parametrize(
    "message",
    [
        Embed(RequestId("r"), [[1, 2], [3]], TenantId("t"), 0, 1.5, {"traceparent": "x"}, 8),
        Embedded(RequestId("r"), bytes(range(16)), 2, LOAD),
        ResetPrefixCache(),
    ],
)
def test_a_message_comes_back_as_it_was_sent(message: Embed | Embedded | ResetPrefixCache) -> None:
    kind, payload = encode(message)
    assert decode([kind, payload]) == message
    assert isinstance(msgspec.msgpack.decode(payload), list), "positional"


def test_vectors_are_raw_bytes_on_the_wire() -> None:
    vectors = bytes(4096 * 4)
    assert len(encode(Embedded(RequestId("r"), vectors, 4096, LOAD))[1]) < len(vectors) + 50


def test_a_card_without_the_newer_fields_is_that_of_a_generating_engine() -> None:
    older = msgspec.msgpack.encode(["m", "llama", 1000, 64, 8, 16, 100, "float32", [2]])
    card = msgspec.msgpack.decode(older, type=ModelCard)
    assert (card.runner, card.embedding_dim, card.matryoshka_dimensions) == ("generate", 0, None)


def test_a_field_that_only_a_newer_peer_knows_is_passed_over() -> None:
    newer = [
        *msgspec.msgpack.decode(encode(Embed(RequestId("r"), [[1]], TenantId("t")))[1]),
        1,
        None,
        {},
        None,
    ]
    payload = msgspec.msgpack.encode([*newer, "what will be"])
    assert decode([MessageType.EMBED.frame, payload]) == Embed(RequestId("r"), [[1]], TenantId("t"))


@pytest.mark.parametrize("texts", [[1, 2], [["a"]], None, [[1.5]]])
def test_texts_that_are_no_lists_of_token_ids_are_no_message(texts: object) -> None:
    with pytest.raises(ProtocolError):
        decode([MessageType.EMBED.frame, msgspec.msgpack.encode(["r", texts, "t"])])


def card(matryoshka_dimensions: list[int] | None) -> ModelCard:
    return ModelCard("m", "bert", 100, 64, 8, 16, 0, "float32", [], "pooling", 64, matryoshka_dimensions)


@pytest.mark.parametrize(
    ("asked", "trained_for", "dim"),
    [(None, None, 64), (64, None, 64), (16, [], 16), (16, [16, 32], 16), (64, [16], 64)],
)
def test_what_a_model_was_trained_for_can_be_asked(
    asked: int | None, trained_for: list[int] | None, dim: int
) -> None:
    assert dim_of(asked, card(trained_for)) == dim


@pytest.mark.parametrize(
    ("asked", "trained_for", "complaint"),
    [(16, None, "not trained"), (65, [], "1 to 64"), (0, [], "1 to 64"), (17, [32, 16], "16, 32, 64")],
)
def test_other_dimensions_are_refused(asked: int, trained_for: list[int] | None, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        dim_of(asked, card(trained_for))
    assert caught.value.param == "dimensions"
