"""What holds a model to calls of the tools that a request has: grammars in llguidance's Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md has the syntax. A marker that is one token
of the vocabulary stands in it by its number, since the library takes such tokens for no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.errors import invalid_request
from gateway.openai.conversation import Tool
from gateway.openai.reasoning import ReasoningMarkers
from shared.sampling import StructuredOutput
from shared.tokenizer import Tokenizer

MAX_CALLS = 16  # of one turn that must call: a model that finds no end has to be told where it is

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_KEYWORD = re.compile(r"[\w-]+")  # as the parser reads them
_WHITESPACE = r"[ \t\r\n]{0,64}"  # between the parts of JSON; without a bound a small model may not stop


@dataclass(frozen=True, slots=True)
class CallRules:
    """How one way of writing calls looks as a grammar."""

    calls: str  # what stands for one or more calls
    rules: Sequence[str]  # that it refers to
    trigger: str | None  # what a call begins with wherever it stands; None: only as a whole message
    is_token: bool = False  # whether the trigger is one token
    behind_trigger: str = ""  # the rest of one call
    first_characters: str = ""  # without a trigger: no other message begins with one of them


class CallWriter(Protocol):
    def __call__(self, speller: Speller, tools: Sequence[Tool], max_calls: int) -> CallRules: ...


class Speller:
    """Pieces of grammars, for one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def marker(self, text: str) -> str:
        token_id = self._tokenizer.added_token(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def is_token(self, text: str) -> bool:
        return self._tokenizer.added_token(text) is not None


def literal(text: str) -> str:
    return json.dumps(text)


def json_of(schema: Any, *, is_strict: bool) -> str:
    """A value of this schema. Strict: a schema that cannot be enforced in full is refused."""
    options = {
        "lenient": not is_strict,
        "coerce_one_of": True,
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
    }
    schema = dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
    return "%json " + json.dumps({**schema, "x-guidance": options})


def arguments_of(tool: Tool) -> str:
    schema = _NO_PARAMETERS if tool.parameters is None else {"type": "object", **tool.parameters}
    return json_of(schema, is_strict=tool.is_strict)


def hermes_calls(speller: Speller, tools: Sequence[Tool], max_calls: int) -> CallRules:
    begin, end = speller.marker("<tool_call>"), speller.marker("</tool_call>")
    rules = [
        f"call: {begin} rest_of_call",
        f'rest_of_call: "\\n" object "\\n" {end}',
        *_objects(tools, "arguments"),
    ]
    return CallRules(
        _repeated("call", literal("\n"), max_calls),
        rules,
        trigger=begin,
        is_token=speller.is_token("<tool_call>"),
        behind_trigger="rest_of_call",
    )


def llama3_json_calls(speller: Speller, tools: Sequence[Tool], max_calls: int) -> CallRules:
    calls = _repeated("object", literal("; "), max_calls)
    return CallRules(calls, _objects(tools, "parameters"), trigger=None, first_characters="{")


def mistral_list_calls(speller: Speller, tools: Sequence[Tool], max_calls: int) -> CallRules:
    marker = speller.marker("[TOOL_CALLS]")
    objects = _repeated("object", literal(", "), max_calls)
    return CallRules(
        f"{marker} list",
        [f'list: "[" {objects} "]"', *_objects(tools, "arguments")],
        trigger=marker,
        is_token=speller.is_token("[TOOL_CALLS]"),
        behind_trigger="list",
    )


def mistral_named_calls(speller: Speller, tools: Sequence[Tool], max_calls: int) -> CallRules:
    marker, before_arguments = speller.marker("[TOOL_CALLS]"), speller.marker("[ARGS]")
    bodies = [f"{literal(tool.name)} {before_arguments} arguments_{n}" for n, tool in enumerate(tools)]
    rules = [
        f"call: {marker} body",
        f"body: {' | '.join(bodies)}",
        *(f"arguments_{n}: {arguments_of(tool)}" for n, tool in enumerate(tools)),
    ]
    return CallRules(
        f"call{{1,{max_calls}}}",
        rules,
        trigger=marker,
        is_token=speller.is_token("[TOOL_CALLS]"),
        behind_trigger="body",
    )


def pythonic_calls(speller: Speller, tools: Sequence[Tool], max_calls: int) -> CallRules:
    rules = [f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        rules += _keyword_call(number, tool)
    calls = f'"[" {_repeated("call", literal(", "), max_calls)} "]"'
    return CallRules(calls, rules, trigger=None, first_characters="[")


def forced(rules: CallRules, thoughts: Thoughts | None) -> StructuredOutput:
    """Calls and nothing else, but for what the model thinks first."""
    return _form([f"start: {_behind(thoughts)}{rules.calls}", *rules.rules], thoughts)


def forced_or_answer(rules: CallRules, answer: str, thoughts: Thoughts | None) -> StructuredOutput:
    """Calls, or what `answer` is the Lark of."""
    start = f"start: {_behind(thoughts)}({rules.calls} | answer)"
    return _form([start, f"answer: {answer}", *rules.rules], thoughts)


def answer_alone(answer: str, thoughts: Thoughts) -> StructuredOutput:
    return _form([f"start: {_behind(thoughts)}answer", f"answer: {answer}"], thoughts)


def free(rules: CallRules) -> StructuredOutput:
    """Any text; but where it begins a call, it has to be a right one."""
    lines = list(rules.rules)
    if rules.trigger is None:
        lines = [
            f"start: {rules.calls} | OTHER",
            f"OTHER: /([^{_in_class(rules.first_characters)}](.|\\n)*)?/",
            *lines,
        ]
    else:
        lazy = "" if rules.is_token else "[lazy]"
        lines = [
            f"start: (opened {rules.behind_trigger})* TEXT",
            f"opened{lazy}: TEXT {rules.trigger}",
            "TEXT: /(.|\\n)*/",
            *lines,
        ]
    return StructuredOutput("schemas", "\n".join(lines))


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What may stand before the answer; `is_open`: the prompt has begun it."""

    markers: ReasoningMarkers
    speller: Speller
    is_open: bool

    @property
    def rules(self) -> list[str]:
        end = self.speller.marker(self.markers.end)
        lazy = "" if self.speller.is_token(self.markers.end) else "[lazy]"
        begin = "" if self.is_open else f"{self.speller.marker(self.markers.begin)} "
        return [
            f"thoughts: {begin}thought BLANKS",
            f"thought{lazy}: TEXT {end}",
            "TEXT: /(.|\\n)*/",
            r"BLANKS: /\n{0,2}/",
        ]


def _behind(thoughts: Thoughts | None) -> str:
    if thoughts is None:
        return ""
    return "thoughts " if thoughts.is_open else "thoughts? "


def _form(lines: Sequence[str], thoughts: Thoughts | None) -> StructuredOutput:
    return StructuredOutput("schemas", "\n".join([*lines, *(thoughts.rules if thoughts else ())]))


def _repeated(rule: str, between: str, max_times: int) -> str:
    return rule if max_times == 1 else f"{rule} ({between} {rule}){{0,{max_times - 1}}}"


def _objects(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """Rules for `object`: a call as one JSON object."""
    names = [f"object_{number}" for number in range(len(tools))]
    rules = [f"object: {' | '.join(names)}"]
    for number, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name)}, "{arguments_key}": '
        rules.append(f'object_{number}: {literal(begin)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {arguments_of(tool)}")
    return rules


def _keyword_call(number: int, tool: Tool) -> list[str]:
    """Rules for `call_{number}`: the arguments as keywords, in the order of the schema, with JSON values."""
    schema: Mapping[str, Any] = tool.parameters or _NO_PARAMETERS
    properties = schema.get("properties", {})
    for name in properties:
        if not _KEYWORD.fullmatch(name):
            raise invalid_request(
                f"This model writes arguments as keywords of Python, and {name[:64]!r}, of the tool "
                f"{tool.name!r}, cannot be one.",
                "tools",
                "invalid_value",
            )
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = set(schema.get("required", ()))
    # `first_N_i`: arguments from the i-th on, none of which stands yet; `more_N_i`: behind another one.
    rules = [f'call_{number}: {literal(tool.name + "(")} first_{number}_0 ")"']
    for index, (name, of_value) in enumerate(properties.items()):
        value = f"value_{number}_{index}"
        of_value = {**of_value, **definitions} if isinstance(of_value, Mapping) else of_value
        rules.append(f"{value}: {json_of(of_value, is_strict=tool.is_strict)}")
        given = f"{literal(name + '=')} {value} more_{number}_{index + 1}"
        left_out = "" if name in required else f" | first_{number}_{index + 1}"
        rules.append(f"first_{number}_{index}: {given}{left_out}")
        left_out = "" if name in required else f" | more_{number}_{index + 1}"
        rules.append(f'more_{number}_{index}: ", " {given}{left_out}')
    return [*rules, f'first_{number}_{len(properties)}: ""', f'more_{number}_{len(properties)}: ""']


def _in_class(characters: str) -> str:
    return "".join("\\" + character for character in characters)
