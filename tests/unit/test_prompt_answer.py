"""What a gateway makes of the scores that an engine tells of a prompt, and of several candidates."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.answer import AnswerIdentity, WholeChoice
from gateway.openai.best_of import best_choices
from gateway.openai.completion_format import CompletionFormat
from gateway.openai.sampling import MAX_PROMPT_LOGPROBS, sampling_of
from gateway.openai.schema import ChatCompletionBody, CompletionBody, check_body
from gateway.prompt_answer import Echo, PromptAnswer
from gateway.scored_token import TextPosition
from gateway.text_delta import TextDelta
from shared.byte_text import byte_text_bundle
from shared.messages import ModelCard, TokenLogprobs
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer

CARD = ModelCard("m", "llama", 300, 10_000, 8, 16, 10_000, "float32", [2])
BYTES = Tokenizer(byte_text_bundle())


def scores(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, 2, [(65, -0.25), (token_id, -0.5)]) for token_id in token_ids]


def make_answer(token_ids: list[int], echo: Echo | None = None, **numbers: Any) -> PromptAnswer:
    return PromptAnswer(
        token_ids, echo, BYTES, **({"num_logprobs": None, "num_prompt_logprobs": None} | numbers)
    )


@pytest.mark.parametrize("told", [[], [104], [104, 105, 106], [104, 33]])
def test_an_engine_that_tells_of_another_prompt_is_an_error_and_no_wrong_answer(told: list[int]) -> None:
    token_ids = list(b"phi")
    answers = [
        make_answer(token_ids, Echo("phi", 0), num_logprobs=1),
        make_answer(token_ids, num_prompt_logprobs=1),
    ]
    for answer in answers:
        answer.take(scores(told))
        with pytest.raises(ApiError) as caught:
            _ = (answer.echoed, answer.ranked)
        assert caught.value.status == 502


def test_what_is_not_asked_for_is_not_told() -> None:
    answer = make_answer(list(b"phi"), Echo("phi", 0))
    assert (answer.text, answer.echoed, answer.ranked) == ("phi", [], None)
    answer = make_answer(list(b"phi"), num_logprobs=1)  # of the output
    assert (answer.text, answer.echoed, answer.ranked) == ("", [], None)


def test_each_place_gets_as_many_alternatives_as_were_asked_for_there() -> None:
    answer = make_answer(list(b"phi"), Echo("phi", 0), num_logprobs=0, num_prompt_logprobs=1)
    answer.take(scores(list(b"hi")))
    assert [(one.text, one.logprob, one.top) for one in answer.echoed] == [
        ("p", None, []), ("h", -0.5, []), ("i", -0.5, []),
    ]  # fmt: skip
    assert answer.ranked is not None
    assert [[(one.text, one.rank) for one in ranked] for ranked in answer.ranked] == [
        [("h", 2), ("A", 1)], [("i", 2), ("A", 1)],
    ]  # fmt: skip


def test_a_prompt_of_one_token_has_no_scores() -> None:
    answer = make_answer([65], Echo("A", 0), num_logprobs=2, num_prompt_logprobs=2)
    assert [(one.text, one.logprob, one.offset) for one in answer.echoed] == [("A", None, 0)]
    assert answer.ranked == []


# -------------------------------------------------------------------------- offsets


@pytest.mark.parametrize("text", ["a🙂b", "🙂", "éé", "日本 x"])
def test_tokens_that_share_a_character_begin_where_it_does(text: str) -> None:
    position = TextPosition(BYTES)
    offsets = []
    for byte in text.encode():
        offsets.append(position.offset)
        position.pass_over(byte)
    encoded = text.encode()
    assert offsets == [len(encoded[:index].decode(errors="ignore")) for index in range(len(encoded))]
    assert position.offset == len(text)


def test_bytes_that_never_become_a_character_do_not_hold_up_the_rest() -> None:
    position = TextPosition(BYTES)
    for byte in b"\xf0" * 9 + b"abcdefgh":
        position.pass_over(byte)
    assert position.offset == len((b"\xf0" * 9).decode(errors="replace")) + 8


def sentencepiece_like() -> Tokenizer:
    """Puts a bos token and a space in front of a text; its decoder strips the space."""
    fast = tokenizers.Tokenizer(
        models.BPE({"<s>": 0, "\u2581": 1, "a": 2, "b": 3, "\u2581a": 4}, [("\u2581", "a")])
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bundle = TextBundle(fast.to_str().encode(), None, {}, 0, [], adds_bos=True)
    return Tokenizer(bundle)


def test_offsets_of_an_echo_are_those_of_the_text_that_the_client_wrote() -> None:
    tokenizer = sentencepiece_like()
    token_ids = tokenizer.encode("ab a")
    assert token_ids == [0, 4, 3, 4]
    answer = PromptAnswer(
        token_ids,
        Echo("ab a", tokenizer.num_added_tokens),
        tokenizer,
        num_logprobs=0,
        num_prompt_logprobs=None,
    )
    answer.take(scores(token_ids[1:]))
    assert [(one.text, one.offset) for one in answer.echoed] == [("<s>", 0), (" a", 0), ("b", 1), (" a", 2)]


# -------------------------------------------------------------------------- the best of several


def make_choice(*updates: tuple[str, int, float]) -> WholeChoice:
    choice = WholeChoice()
    for text, num_tokens, logprob_sum in updates:
        choice.add(TextDelta(0, text, None, num_tokens=num_tokens, logprob_sum=logprob_sum))
    return choice


def test_a_long_answer_is_not_worse_for_its_length() -> None:
    short = make_choice(("s", 1, -1.0))
    long = make_choice(("l", 2, -1.0), ("o", 2, -0.8))  # less likely as a whole, more likely per token
    empty = make_choice()
    assert [c.text for c in best_choices([short, long], num_candidates=2, n=1)] == ["lo"]
    assert best_choices([short, long, empty], num_candidates=3, n=3) == [short, long, empty]


def test_each_prompt_has_its_own_best_and_equals_keep_their_order() -> None:
    choices = [
        make_choice((name, 1, logprob))
        for name, logprob in zip("abcdef", (-3, -1, -1, -9, -8, -7), strict=True)
    ]
    assert [choice.text for choice in best_choices(choices, num_candidates=3, n=2)] == ["b", "c", "f", "e"]


def test_scores_that_only_rank_are_not_told() -> None:
    choice = make_choice(("a", 1, -1.0))
    document = CompletionFormat(AnswerIdentity("id", "m", 0)).whole([choice], Usage(1, 1, 0))
    assert document["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}
    ]


# -------------------------------------------------------------------------- what is asked of the engine


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"echo": True}, None, None),
        ({"logprobs": 2}, 2, None),
        ({"echo": True, "logprobs": 2}, 2, 2),
        ({"echo": True, "logprobs": 0}, 0, 0),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, 1, 3),
        ({"prompt_logprobs": 0}, None, 0),
        ({"best_of": 3}, 0, None),
        ({"best_of": 3, "logprobs": 4}, 4, None),
        ({"best_of": 1}, None, None),
    ],
)
def test_the_engine_is_asked_for_what_the_answer_needs(
    fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    body = check_body(CompletionBody, {"model": "m", "prompt": "a", **fields})
    sampling = sampling_of(body, CARD, [5], "prompt")
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_an_answer_holds_a_bounded_number_of_prompt_scores() -> None:
    def scored(kind: Any, lengths: list[int], **fields: Any) -> int | None:
        given = (
            {"prompt": "a"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}
        )
        return sampling_of(
            check_body(kind, {"model": "m", **given, **fields}), CARD, lengths, "x"
        ).prompt_logprobs

    assert scored(CompletionBody, [2047] * 64, echo=True, logprobs=1) == 1
    assert scored(ChatCompletionBody, [9000], n=16, prompt_logprobs=20) == 20
    with pytest.raises(ApiError) as caught:
        scored(CompletionBody, [9000], n=2, prompt_logprobs=20)
    assert caught.value.param == "prompt_logprobs"
    assert str(MAX_PROMPT_LOGPROBS) in caught.value.message
