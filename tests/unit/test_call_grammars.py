"""Grammars of tool calls let right calls through and no others, whatever the vocabulary has as a token."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from gateway.openai.conversation import Tool
from gateway.openai.reasoning import ReasoningMarkers
from gateway.openai.tools.call_grammar import (
    Speller,
    Thoughts,
    answer_alone,
    forced,
    forced_or_answer,
    free,
    hermes_calls,
    json_of,
    llama3_json_calls,
    mistral_list_calls,
    mistral_named_calls,
    pythonic_calls,
)
from shared.sampling import StructuredOutput
from shared.tokenizer import Tokenizer
from tests.unit.chat_models import grammar_tokenizer, text_bundle

MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", "of a city", WEATHER, is_strict=True), Tool("now")]

ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "now", "arguments": {}}'
WRONG = '{"name": "weather", "arguments": {"town": "Rome"}}'
UNKNOWN = '{"name": "winner", "arguments": {}}'


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


class Model:
    def __init__(self, **markers: tuple[str, ...]) -> None:
        bundle = text_bundle(**markers)
        self.tokenizer = Tokenizer(bundle)
        self.speller = Speller(self.tokenizer)
        self._grammar_tokenizer = grammar_tokenizer(bundle)

    def allows(self, form: StructuredOutput, text: str) -> bool:
        """Whether the whole text may be written, and may be all."""
        assert not self.problem(form), form.text
        matcher = LLMatcher(self._grammar_tokenizer, form.text)
        token_ids = self.tokenizer.encode(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def problem(self, form: StructuredOutput) -> str:
        return str(LLMatcher.validate_grammar(form.text, self._grammar_tokenizer))


@pytest.fixture(
    scope="module",
    params=[{}, {"added": MARKERS}, {"special": MARKERS}],
    ids=["markers are text", "markers are tokens", "markers are special tokens"],
)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(**request.param)


FORMATS = {
    "hermes": (
        hermes_calls,
        [tagged(ROME), tagged(NOW), f"{tagged(ROME)}\n{tagged(NOW)}"],
        [tagged(WRONG), tagged(UNKNOWN), f"<tool_call>{ROME}</tool_call>"],
    ),
    "llama3_json": (
        llama3_json_calls,
        [
            '{"name": "weather", "parameters": {"city": "Rome", "unit": "C"}}',
            '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        ],
        ['{"name": "weather", "parameters": {"unit": "C"}}', '{"name": "winner", "parameters": {}}'],
    ),
    "mistral, a list": (
        mistral_list_calls,
        [f"[TOOL_CALLS][{ROME}]", f"[TOOL_CALLS][{ROME}, {NOW}]"],
        [f"[TOOL_CALLS][{WRONG}]", f"[TOOL_CALLS][{ROME}", "[TOOL_CALLS][]"],
    ),
    "mistral, named": (
        mistral_named_calls,
        ['[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"],
        ['[TOOL_CALLS]weather[ARGS]{"days": 1}', "[TOOL_CALLS]winner[ARGS]{}"],
    ),
    "pythonic": (
        pythonic_calls,
        ['[weather(city="Rome")]', '[weather(city="Rome", unit="F"), now()]', '[weather(city="a", days=3)]'],
        ["[weather()]", '[weather(days=3, city="a")]', '[weather(city="a",)]', "[winner()]"],
    ),
}
EACH_FORMAT = pytest.mark.parametrize(("calls", "right", "wrong"), FORMATS.values(), ids=FORMATS)


@EACH_FORMAT
def test_who_must_call_writes_right_calls_and_nothing_else(model, calls, right, wrong):
    form = forced(calls(model.speller, TOOLS, 2), None)
    assert [text for text in right if not model.allows(form, text)] == []
    assert [text for text in [*wrong, "", "hello"] if model.allows(form, text)] == []


@EACH_FORMAT
def test_who_may_call_may_say_anything_but_no_wrong_call(model, calls, right, wrong):
    form = free(calls(model.speller, TOOLS, 2))
    assert [text for text in [*right, "", "hello\n\nyou"] if not model.allows(form, text)] == []
    assert [text for text in wrong if model.allows(form, text)] == []


@pytest.mark.parametrize("calls", [hermes_calls, mistral_list_calls, mistral_named_calls])
def test_a_call_may_come_in_the_middle_of_a_text_where_a_marker_tells(model, calls):
    form = free(calls(model.speller, TOOLS, 2))
    right, wrong = next(FORMATS[name][1:] for name in FORMATS if FORMATS[name][0] is calls)
    assert model.allows(form, f"Let me see. {right[0]}")
    assert not model.allows(form, f"Let me see. {wrong[0]}")


def test_a_turn_has_no_more_calls_than_it_may_have(model):
    one, two = tagged(NOW), f"{tagged(NOW)}\n{tagged(NOW)}"
    assert model.allows(forced(hermes_calls(model.speller, TOOLS, 2), None), two)
    form = forced(hermes_calls(model.speller, TOOLS, 1), None)
    assert model.allows(form, one)
    assert not model.allows(form, two)


def test_an_answer_in_a_form_may_stand_in_the_place_of_a_call(model):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = json_of({**schema, "additionalProperties": False}, is_strict=True)
    form = forced_or_answer(hermes_calls(model.speller, TOOLS, 2), answer, None)
    assert model.allows(form, tagged(ROME))
    assert model.allows(form, '{"a": 1}')
    assert not model.allows(form, "a")
    assert not model.allows(form, tagged(WRONG))


@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_may_come_before_what_has_a_form(model, is_open):
    thoughts = Thoughts(ReasoningMarkers("<think>", "</think>"), model.speller, is_open)
    begin = "" if is_open else "<think>"
    call = forced(hermes_calls(model.speller, TOOLS, 2), thoughts)
    answer = answer_alone(json_of({"type": "object"}, is_strict=True), thoughts)
    assert model.allows(call, f'{begin}\nIs {{"it"\n</think>\n\n{tagged(ROME)}')
    assert model.allows(answer, begin + '\n{"a\n</think>\n\n{"b": 1}')
    assert not model.allows(call, f"{begin}hm")
    # A model that is not within its thoughts need not have any.
    assert model.allows(call, tagged(ROME)) != is_open


def test_definitions_of_a_schema_hold_within_a_call(model):
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
    schema = {
        "type": "object",
        "properties": {"list": {"$ref": "#/$defs/N"}},
        "required": ["list"],
        "$defs": {"N": {**node, "required": ["next"], "additionalProperties": False}},
    }
    tools = [Tool("f", None, schema)]
    object_call = '{"name": "f", "arguments": {"list": {"next": {"next": null}}}}'
    assert model.allows(forced(hermes_calls(model.speller, tools, 1), None), tagged(object_call))
    form = forced(pythonic_calls(model.speller, tools, 1), None)
    assert model.allows(form, '[f(list={"next": {"next": null}})]')
    assert not model.allows(form, '[f(list={"next": 1})]')


def test_only_strict_tools_refuse_what_cannot_be_enforced(model):
    """The library knows no `uniqueItems`."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    forms = [
        forced(hermes_calls(model.speller, [Tool("f", None, schema, is_strict)], 1), None)
        for is_strict in (False, True)
    ]
    assert model.problem(forms[0]) == ""
    assert "uniqueItems" in model.problem(forms[1])
