"""What becomes of fields that nothing knows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.openai.schema import ChatCompletionBody, CompletionBody
from gateway.openai.unknown_fields import MAX_NAMED, check_without_unknown, header_value

MESSAGE = {"role": "user", "content": "hi"}
CHAT = {"model": "m", "messages": [MESSAGE]}


def test_they_are_taken_out_wherever_they_are_and_named() -> None:
    document = {
        **CHAT,
        "reasoning_depth": 3,
        "messages": [
            {**MESSAGE, "weight": 1},
            {"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]},
        ],
        "stream_options": {"include_usage": True, "more": {"a": [1]}},
        "temperature": 0.5,
    }  # fmt: skip
    body, ignored = check_without_unknown(ChatCompletionBody, document)
    assert (body.temperature, len(body.messages), body.includes_usage) == (0.5, 2, True)
    assert set(ignored) == {
        "reasoning_depth",
        "messages[0].weight",
        "messages[1].content[0].y",
        "stream_options.more",
    }


def test_what_is_wrong_in_another_way_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        check_without_unknown(ChatCompletionBody, {**CHAT, "unknown": 1, "temperature": "hot"})
    assert refused.value.param == "temperature"
    with pytest.raises(ApiError):
        check_without_unknown(ChatCompletionBody, [CHAT])


@given(
    st.dictionaries(st.text(min_size=1), st.integers(), max_size=4), st.lists(st.text(min_size=1), max_size=3)
)
def test_any_names_do(unknown: dict[str, Any], nested: list[str]) -> None:
    known = CompletionBody.model_fields
    unknown = {name: value for name, value in unknown.items() if name not in known}
    document: dict[str, Any] = {"model": "m", "prompt": "x", **unknown}
    inner = {name: 1 for name in nested if name != "include_usage"}
    document["stream_options"] = dict(inner)
    _, ignored = check_without_unknown(CompletionBody, document)
    assert len(ignored) == len(unknown) + len(inner)
    header_value(ignored).encode("ascii")


def test_the_header_has_no_line_breaks_and_an_end() -> None:
    value = header_value(["a\r\nset-cookie: x", "b,c", "ü", *map(str, range(MAX_NAMED + 5))])
    assert value.isascii()
    assert value.isprintable()
    assert value.startswith("aset-cookie: x, b%2Cc, \\xfc, 0, 1")
    assert value.endswith("and 8 more")
