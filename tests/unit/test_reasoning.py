"""Thoughts are told from the answer, however the text is cut into pieces."""

from __future__ import annotations

import random

import pytest

from gateway.openai.reasoning import ReasoningSplitter, reasoning_markers

MARKERS = reasoning_markers("think", "")
SEED = random.randrange(2**32)

CASES = [
    # text, whether the prompt opens the thoughts, thoughts, answer
    ("<think>\nhm, two\n</think>\n\nfour", False, "hm, two", "four"),
    ("hm, two\n</think>\n\nfour", True, "hm, two", "four"),
    ("\n<think>hm</think>four\n", False, "hm", "four\n"),
    ("<think></think>four", False, "", "four"),
    ("four", False, "", "four"),
    (" <b>four</b>", False, "", " <b>four</b>"),
    ("a <think>b</think>", False, "", "a <think>b</think>"),
    ("<thin", False, "", "<thin"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("a < b </ c </think>d", True, "a < b </ c", "d"),
    ("one\n\n\ntwo</think>x</think>y", True, "one\n\n\ntwo", "x</think>y"),
    ("<think> \n ", False, "", ""),
    ("</think>", True, "", ""),
    ("", False, "", ""),
    (" \n", False, "", " \n"),
]


def split(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(MARKERS, is_open=is_open)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts)


@pytest.mark.parametrize(("text", "is_open", "thoughts", "answer"), CASES)
def test_thoughts_and_answer_come_apart_wherever_the_text_is_cut(text, is_open, thoughts, answer):
    generator = random.Random(SEED)
    print("seed", SEED)
    cuts = [[text], list(text)]
    for _ in range(30):
        at = sorted(generator.choices(range(len(text) + 1), k=3))
        cuts.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    for pieces in cuts:
        assert split(pieces, is_open=is_open) == (thoughts, answer), pieces


def test_what_is_certain_is_told_at_once():
    splitter = ReasoningSplitter(MARKERS, is_open=False)
    assert splitter.feed("<think>one two") == ("one two", "")
    assert splitter.feed(" three </th") == (" three", "")
    assert splitter.feed("ink>\n\nfour") == ("", "four")
    assert splitter.feed(" five") == ("", " five")


@pytest.mark.parametrize(
    ("configured", "template", "begin"),
    [
        (None, "{{ '<think>' }} {{ '</think>' }}", "<think>"),
        (None, "[THINK]{{ x }}[/THINK]", "[THINK]"),
        (None, "{{ messages }}", None),
        ("none", "</think>", None),
        ("mistral", "</think>", "[THINK]"),
    ],
)
def test_the_markers_are_those_of_the_template_unless_configured(configured, template, begin):
    markers = reasoning_markers(configured, template)
    assert (markers.begin if markers else None) == begin


def test_a_prompt_that_ends_within_the_thoughts_is_known():
    assert MARKERS.are_opened_by("<assistant>\n<think>\n")
    assert not MARKERS.are_opened_by("<assistant>\n<think>\n\n</think>\n\n")
