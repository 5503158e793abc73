"""Text appears as soon as it is certain, never twice, never in halves."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.byte_text import byte_text_bundle
from shared.detokenizer import IncrementalDetokenizer
from shared.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_text_bundle())  # one token per byte, with the byte as its id


def stream(data: bytes, **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER, **options)
    deltas = [detokenizer.append([token]) for token in list(data)]
    return [*deltas, detokenizer.finish()]


def test_a_character_is_never_split():
    deltas = stream("a你好😀é".encode())
    assert "".join(deltas) == "a你好😀é"
    assert not any("\ufffd" in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == ["a", "你", "好", "😀", "é"]


def test_a_partial_character_at_the_end_is_flushed():
    assert "".join(stream(b"wor" + "好".encode()[:1])) == "wor\ufffd"


def test_an_invalid_byte_between_characters_loses_and_repeats_nothing():
    data = "你".encode() + "好".encode()[:1] + b"\xff" + b"a"
    assert "".join(stream(data)) == data.decode(errors="replace")


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_deltas_of_any_bytes_add_up_to_the_whole_text(data):
    assert "".join(stream(data)) == TOKENIZER.decode(list(data))


@given(st.text(max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_deltas_do_not_depend_on_how_tokens_are_grouped(text, data):
    tokens = list(text.encode())
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    shown = ""
    while tokens:
        size = data.draw(st.integers(1, len(tokens)))
        shown += detokenizer.append(tokens[:size])
        tokens = tokens[size:]
    assert shown + detokenizer.finish() == text


def test_ten_thousand_invalid_bytes_take_linear_time():
    def seconds(count: int) -> float:
        began = time.perf_counter()
        stream(b"\xff" * count)
        return time.perf_counter() - began

    seconds(100)
    # Quadratic time would make this ratio 100; the wide margin is for a busy machine.
    assert seconds(10_000) < 40 * max(seconds(1_000), 0.001)


def test_tokens_are_shown_while_bytes_stay_invalid():
    deltas = stream(b"\xff" * 100)
    assert sum(bool(delta) for delta in deltas[:-1]) >= 20


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_cuts_the_text_and_no_piece_of_it_leaks(text, stop):
    shown = "".join(stream(text.encode(), stop=stop))
    # The first stop string to be completed decides; of two that end together the longer one.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert shown == expected


def test_text_that_could_begin_a_stop_string_is_held_back_until_it_cannot():
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=["END"])
    tokens = list(b"xEN")
    assert detokenizer.append(tokens) == "x"
    assert detokenizer.append(list(b"X")) == "E"
    assert detokenizer.finish() == "NX"
    assert not detokenizer.stopped


def test_the_stop_string_that_was_met_is_told_the_longest_of_those_that_end_there():
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=["zz", "D", "END"])
    detokenizer.append(list(b"xEN"))
    assert detokenizer.stop_string is None
    detokenizer.append(list(b"Dzz"))
    assert detokenizer.stop_string == "END"


def test_the_stop_string_may_be_part_of_the_output():
    assert "".join(stream(b"one.two", stop=["."], include_stop_in_output=True)) == "one."


def test_nothing_is_shown_after_a_stop_string():
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=["b"])
    assert detokenizer.append(list(b"abc")) == "a"
    assert detokenizer.stopped
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("text", ["data: [DONE]", "\n\ndata: [DONE]\n\n", "\r\n: comment\r\n\r\n"])
def test_text_that_looks_like_framing_arrives_intact(text):
    assert "".join(stream(text.encode())) == text


def test_special_tokens_are_left_out_unless_asked_for():
    end = TOKENIZER.encode("<|end|>")
    assert end == [256]
    hidden, shown = (
        IncrementalDetokenizer(TOKENIZER),
        IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False),
    )
    assert hidden.append(end) + hidden.finish() == ""
    assert shown.append(end) + shown.finish() == "<|end|>"


def test_a_stop_string_inside_the_first_min_tokens_does_not_stop():
    assert "".join(stream(b"a.b.c.", stop=["."], min_tokens=3)) == "a.b"
