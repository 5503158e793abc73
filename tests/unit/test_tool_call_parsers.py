"""How calls of tools are found in what models write, however it arrives and whatever it is."""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.openai.tools.call_parser import CallArguments, CallBegin, CallParser, Part
from gateway.openai.tools.hermes import HermesParser
from gateway.openai.tools.incremental_parser import IncrementalParser
from gateway.openai.tools.json_scanner import JsonScanner, is_json_object
from gateway.openai.tools.llama3_json import Llama3JsonParser
from gateway.openai.tools.mistral import MistralParser
from gateway.openai.tools.python_literal import as_json
from gateway.openai.tools.pythonic import PythonicParser

Format = type[IncrementalParser]
Joined = list[str | tuple[str, str]]  # text, or name and arguments of a call

NAMES = ("f", "g", "get-weather", "math.add")
FORMATS: tuple[Format, ...] = (HermesParser, Llama3JsonParser, MistralParser, PythonicParser)
NASTY = r'{"a": "</tool_call> [TOOL_CALLS] }] \" \\ data: [DONE]\n\n \ud83d\ude00 \ud83d 😀 ﷽ \/"}'

HERMES: list[tuple[str, Joined]] = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
    (
        ' Let me see.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n\n'
        '<tool_call>{"name":"g","arguments":{"b":[1,{}]}}</tool_call>\n',
        [" Let me see.\n\n", ("f", "{}"), ("g", '{"b":[1,{}]}')],
    ),
    (
        '\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n\nDone.\n',
        [("f", "{}"), "\n\nDone.\n"],
    ),
    (f'<tool_call>{{"name": "f", "arguments": {NASTY}}}</tool_call>', [("f", NASTY)]),
    (
        '<tool_call>{"arguments": { "a" : "}" } , "id": [1, null], "name": "f"}</tool_call>!',
        [("f", '{ "a" : "}" }'), "!"],
    ),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")]),
    (
        r'<tool_call>{"name": "f", "arguments": " {\"a\": \"\\n\ud83d\"}"}</tool_call>',
        [("f", r'{"a": "\n\ud83d"}')],
    ),
    (
        r'<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        [r'<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'],
    ),
    ('<tool_call>{"name": "f", "arguments": 7}', ['<tool_call>{"name": "f", "arguments": 7}']),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}} ', [("f", '{"a": 1}')]),  # no closing marker
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')]),  # nor a brace
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id', [("f", '{"a": 1}')]),
    (
        '<tool_call>{"name":"f","arguments":{}</tool_call><tool_call>{"name":"g"}</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        '<tool_call>{"name":"f","arguments":{}}}</tool_call><tool_call>{"name":"g"}</tool_call>',
        [("f", "{}"), "}</tool_call>", ("g", "{}")],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": tru', [("f", '{"a": tru')]),
    (
        '<tool_call>{"name":"f","arguments":{"a": trap}}</tool_call> <tool_call>{"name":"g"}',
        [("f", '{"a": tr'), 'ap}}</tool_call> <tool_call>{"name":"g"}'],
    ),
    (
        '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>',  # JSON's strings do not span lines
        [("f", '{"a":"x'), '\ny"}}</tool_call>'],
    ),
    (
        '<tool_call>{"name":"h","arguments":{"a":"<tool_call>{\\"name\\":"}}</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        ['<tool_call>{"name":"h","arguments":{"a":"<tool_call>{\\"name\\":"}}</tool_call>\n', ("g", "{}")],
    ),
    (
        'Write <tool_call> and <tool_call><tool_call>{"name": "f"}</tool_call>',
        ["Write <tool_call> and <tool_call>", ("f", "{}")],
    ),
    ('<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ('<tool_call>{name: "f"}</tool_call>', ['<tool_call>{name: "f"}</tool_call>']),
    ('<tool_call>{"n\\u0061me": "get\\u002dweather"}</tool_call>', [("get-weather", "{}")]),
    ('<tool_call>{"name": "f", "name": "h"}</tool_call>', [("f", "{}")]),
    (" \n", [" \n"]),
    ("<tool_cal", ["<tool_cal"]),
]

LLAMA3: list[tuple[str, Joined]] = [
    ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ('\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}\n', [("f", '{"a": 1}')]),
    ('{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
    (f'{{"name": "f", "parameters": {NASTY}}}', [("f", NASTY)]),
    (
        '{"name":"f","parameters":{}}; {"name":"g","parameters":{"b":2}}\n{"name":"f"},{"name":"g"};',
        [("f", "{}"), ("g", '{"b":2}'), ("f", "{}"), ("g", "{}")],
    ),
    ('[{"name":"f","parameters":{}},\n {"name":"g","parameters":{}} ] ', [("f", "{}"), ("g", "{}")]),
    ('{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
    ('{"type": "function", "function": "f", "parameters": {"a":1}}', [("f", '{"a":1}')]),
    ('{"function": {"name": "f", "parameters": {"a":1}}, "type": "function"}', [("f", '{"a":1}')]),
    ('{"parameters": {"a":1}, "name": "f"}', [("f", '{"a":1}')]),
    (' {"answer": [1, {"name": "f"}]} ', [' {"answer": [1, {"name": "f"}]} ']),
    ('{"name": "h", "parameters": {}}; {"name": "f"}', ['{"name": "h", "parameters": {}}; {"name": "f"}']),
    ('[{"id": 1}, {"name": "f"}]', ['[{"id": 1}, {"name": "f"}]']),
    ("[1, 2]", ["[1, 2]"]),
    ("{}", ["{}"]),
    ('{"id": 1, "name": "f", "parameters": {}}', ['{"id": 1, "name": "f", "parameters": {}}']),
    ('Here: {"name": "f", "parameters": {}}', ['Here: {"name": "f", "parameters": {}}']),
    ('<|python_tag|>print("hi")', ['<|python_tag|>print("hi")']),
    ('{"name":"f","parameters":{}} Done; ', [("f", "{}"), " Done; "]),
    ('{"name":"f","parameters":{}}; {"name":"h"}', [("f", "{}"), '; {"name":"h"}']),
    ('{"name":"f","parameters":{}}; {"name":"g","para', [("f", "{}"), '; {"name":"g","para']),
    ('{"name":"f","parameters":{"a": 01}}', [("f", '{"a": 0'), "1}}"]),
    ('{"name":"f","parameters":{"a": 1', [("f", '{"a": 1')]),
]  # fmt: skip

MISTRAL: list[tuple[str, Joined]] = [
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
    (
        'Well. [TOOL_CALLS][{"name":"f","arguments":{}} , {"arguments":{"b":1},"name":"g","id":"x"}]\n',
        ["Well. ", ("f", "{}"), ("g", '{"b":1}')],
    ),
    (f'[TOOL_CALLS][{{"name": "f", "arguments": {NASTY}}}]', [("f", NASTY)]),
    (f"[TOOL_CALLS]f[ARGS]{NASTY}[TOOL_CALLS]g[ARGS]{{}}", [("f", NASTY), ("g", "{}")]),
    ('[TOOL_CALLS]f[CALL_ID]x7[ARGS]{"a":1}\n[TOOL_CALLS]g{"b":2}', [("f", '{"a":1}'), ("g", '{"b":2}')]),
    ('[TOOL_CALLS]get-weather [ARGS] {"a":1}', [("get-weather", '{"a":1}')]),
    ('[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}} ok', [("f", '{"a": 1}'), " ok"]),
    (
        '[TOOL_CALLS]h[ARGS]{"a":"[TOOL_CALLS]f{}"} [TOOL_CALLS]g[ARGS]{}',
        ['[TOOL_CALLS]h[ARGS]{"a":"[TOOL_CALLS]f{}"} ', ("g", "{}")],
    ),
    (
        '[TOOL_CALLS][{"name":"f"},{"name":"h"},{"name":"g","arguments":{"a":"[TOOL_CALLS]f{}"}}]',
        [("f", "{}"), ',{"name":"h"},{"name":"g","arguments":{"a":"[TOOL_CALLS]f{}"}}]'],
    ),
    ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    ("[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("[TOOL_CALLS]f[ARGS]", ["[TOOL_CALLS]f[ARGS]"]),
    ("[TOOL_CALLS][TOOL_CALLS]f{}", ["[TOOL_CALLS]", ("f", "{}")]),
    ("[TOOL_CALLS][TOOL_CALLS]f[TOOL_CALLS]g{}", ["[TOOL_CALLS][TOOL_CALLS]f", ("g", "{}")]),
    ('[TOOL_CALLS]f[ARGS]{"a": x} [TOOL_CALLS]g{}', [("f", '{"a": '), "x} [TOOL_CALLS]g{}"]),
    ('[TOOL_CALLS]f[ARGS]{"a": "x', [("f", '{"a": "x')]),
    ('[TOOL_CALLS][{"name":"f","arguments":{}}', [("f", "{}")]),
    ('[TOOL_CALLS][{"name":"f","arguments":{}},', [("f", "{}")]),
]

PYTHONIC: list[tuple[str, Joined]] = [
    (
        '[f(a=1, b="x", c=[1, {"k": None}]), g()]',
        [("f", '{"a": 1, "b": "x", "c": [1, {"k": null}]}'), ("g", "{}")],
    ),
    ("<|python_start|>[f(a=1)]<|python_end|>", [("f", '{"a": 1}')]),
    ("\n[ f ( a = 1 , ) , ]\n<|python_tag|> ", [("f", '{"a": 1}')]),
    ("[math.add(x=-1.5, y=+2), get-weather(a_1=.5)]",
     [("math.add", '{"x": -1.5, "y": 2}'), ("get-weather", '{"a_1": 0.5}')]),
    ("[f(a=True, b=true, c=False, d=false, e=None, f=null)]",
     [("f", '{"a": true, "b": true, "c": false, "d": false, "e": null, "f": null}')]),
    ("[f(a=(), b=(1,), c=(1), d=(1, 2), e=((1, 'x'), ('y')))]",
     [("f", '{"a": [], "b": [1], "c": 1, "d": [1, 2], "e": [[1, "x"], "y"]}')]),
    ("[f(a={1: 'x', True: {}, None: [], 'k': [1, 2,],})]",
     [("f", '{"a": {"1": "x", "true": {}, "null": [], "k": [1, 2]}}')]),
    (r"""[f(a='it\'s "so"', b="it's", c='\x41\u00e9\U0001F600\101\n\d\xzz\ud83d\ude00', d='😀 </f>)]')]""",
     [("f", r"""{"a": "it's \"so\"", "b": "it's", "c": "Aé😀A\n\\d\\xzz\ud83d\ude00", "d": "😀 </f>)]"}""")]),
    ("[f(a='x\ny\t\\\nz')]", [("f", r'{"a": "x\ny\tz"}')]),
    ("[f(a=1)] Done.", [("f", '{"a": 1}'), " Done."]),
    ("[h(a=1), f(a=1)]", ["[h(a=1), f(a=1)]"]),
    ("[f(a=1), h(a=1)] x", [("f", '{"a": 1}'), ", h(a=1)] x"]),
    ("[f(x) for x in y]", ["[f(x) for x in y]"]),
    ("[f(1)]", ["[f(1)]"]),
    ("f(a=1)", ["f(a=1)"]),
    ("[1, 2]", ["[1, 2]"]),
    ("see [f(a=1)]", ["see [f(a=1)]"]),
    (" [f", [" [f"]),
    ("[f(a=1, b=oops)] x", [("f", '{"a": 1, "b": '), "oops)] x"]),
    ("[f(a=1, 2)]", [("f", '{"a": 1'), ", 2)]"]),
    ("[f(a=[1, 2 3])]", [("f", '{"a": [1, 2'), " 3])]"]),
    ("[f(a=(1 2))] x", [("f", '{"a": '), "(1 2))] x"]),
    ("[f(a='x", [("f", '{"a": "x')]),
    ("[f(a='x\\", [("f", '{"a": "x')]),
    ("[f(a=1, b", [("f", '{"a": 1')]),
]  # fmt: skip

EXAMPLES = [
    (format_, text, expected)
    for format_, table in zip(FORMATS, (HERMES, LLAMA3, MISTRAL, PYTHONIC), strict=True)
    for text, expected in table
]
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>", "data: [DONE]", "\n", " ", "\\", '"', "'", "{", "}", "[", "]"),
    *("(", ")", ",", ";", ":", "=", "name", "arguments", "parameters", "function", '{"name": '),
    *('"arguments": {', '"name"', '"arguments"'),
    *('"h"', "h(", "h(a=1", "1", "-", "true", "None", "\\ud83d", "😀", "null", "0x"),
)  # fmt: skip
KNOWN_FRAGMENTS = (
    *FRAGMENTS,
    "f",
    '"f"',
    "[f(",
    "f(a=",
    '{"name": "f", ',
    '"arguments": {"a": ',
    "[TOOL_CALLS]f{",
)


def parts_of(format_: Format, pieces: Iterable[str], names: Iterable[str] = NAMES) -> list[Part]:
    parser: CallParser = format_(list(names))
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return parts + parser.finish()


def joined(parts: Iterable[Part]) -> Joined:
    """What the parts add up to. It is no arguments without a call that they belong to."""
    result: Joined = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, CallBegin):
            result.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert isinstance(last, tuple), "arguments follow their call"
            assert part.text
            result[-1] = (last[0], last[1] + part.text)
        else:
            assert part
            if isinstance(last, str):
                result[-1] = last + part
            else:
                result.append(part)
    return result


def cut(text: str, source: random.Random) -> list[str]:
    places = sorted(source.choices(range(len(text) + 1), k=source.randint(1, 6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("format_", "text", "expected"), EXAMPLES)
def test_calls_and_text_are_told_apart(format_: Format, text: str, expected: Joined) -> None:
    assert joined(parts_of(format_, [text])) == expected


@pytest.mark.parametrize(("format_", "text", "expected"), EXAMPLES)
def test_it_makes_no_difference_how_the_text_is_cut(format_: Format, text: str, expected: Joined) -> None:
    assert joined(parts_of(format_, text)) == expected
    seed = random.randrange(2**32)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(50):
        pieces = cut(text, source)
        assert joined(parts_of(format_, pieces)) == expected, pieces


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(KNOWN_FRAGMENTS) | st.text(max_size=3), max_size=12),
    st.randoms(),
)
def test_the_cut_of_any_text_makes_no_difference(
    format_: Format, fragments: list[str], source: random.Random
) -> None:
    text = "".join(fragments)
    whole = joined(parts_of(format_, [text]))
    assert joined(parts_of(format_, text)) == whole
    assert joined(parts_of(format_, cut(text, source))) == whole


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS) | st.text("hx \n<[{", max_size=3), max_size=12),
)
def test_text_without_calls_passes_byte_for_byte(format_: Format, fragments: list[str]) -> None:
    parts = parts_of(format_, fragments, names=["unheard_of"])
    assert "".join(part for part in parts if isinstance(part, str)) == "".join(fragments)
    assert all(isinstance(part, str) for part in parts)


def test_no_damage_to_a_call_raises_or_invents_anything() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(3000):
        format_, text, _expected = source.choice(EXAMPLES)
        damaged = damage(text, source)
        result = joined(parts_of(format_, cut(damaged, source)))
        assert result == joined(parts_of(format_, [damaged])), damaged
        if not any(isinstance(part, tuple) for part in result):
            assert "".join(part for part in result if isinstance(part, str)) == damaged
        for part in result:
            if isinstance(part, str):
                assert part in damaged
            else:
                check_arguments(part[1], damaged)


def damage(text: str, source: random.Random) -> str:
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(text) + 1)
        what = source.randrange(4)
        if what == 0:
            text = text[:at]
        elif what == 1:
            text = text[:at] + text[at + source.randint(1, 4) :]
        elif what == 2:
            text = text[:at] + source.choice(KNOWN_FRAGMENTS) + text[at:]
        else:
            text = (
                text[:at] + chr(source.choice((0, 10, 34, 92, 127, 0xE9, 0xFFFD, 0x1F600))) + text[at + 1 :]
            )
    return text


def check_arguments(arguments: str, where: str) -> None:
    """They are an object, or such a begin of one as may still become one."""
    scanner = JsonScanner()
    assert arguments.startswith("{"), where
    assert scanner.scan(arguments) == len(arguments), where
    assert not scanner.is_broken, where
    if scanner.is_complete:
        assert isinstance(json.loads(arguments), dict), where


@pytest.mark.parametrize(
    ("format_", "begun", "expected"),
    [
        (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x')]),
        (HermesParser, "Hi <b> <tool_cal", ["Hi <b> "]),
        (HermesParser, '<tool_call>{"name": "h", ', ['<tool_call>{"name": "h", ']),
        (Llama3JsonParser, '{"name": "f", "parameters": {"a": [1, 2', [("f", '{"a": [1, 2')]),
        (Llama3JsonParser, '{"answer":', ['{"answer":']),
        (Llama3JsonParser, "No", ["No"]),
        (MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": tr', [("f", '{"a": tr')]),
        (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": "x', [("f", '{"a": "x')]),
        (PythonicParser, "[f(a=1, b=", [("f", '{"a": 1, "b": ')]),
        (PythonicParser, "[f(a=['x', 'yz", [("f", '{"a": ["x", "yz')]),
        (PythonicParser, "[the ", ["[the "]),
    ],
)
def test_what_is_certain_is_told_at_once(format_: Format, begun: str, expected: Joined) -> None:
    for pieces in ([begun], list(begun)):
        parser = format_(NAMES)
        assert joined(part for piece in pieces for part in parser.feed(piece)) == expected


@pytest.mark.parametrize(
    ("format_", "before", "held"),
    [
        (HermesParser, "", '<tool_call>{"arguments": {"a": 1}, "name": "f'),
        (HermesParser, "Hi", '<tool_call>\n{"name": "f", "arguments": '),
        (Llama3JsonParser, "", ' <|python_tag|>{"name": "f", "parameters": '),
        (MistralParser, "Hi", "[TOOL_CALLS]f[ARGS]"),
        (PythonicParser, "", "<|python_start|>[f(a "),
    ],
)
def test_what_may_become_a_call_is_held_back(format_: Format, before: str, held: str) -> None:
    parser = format_(NAMES)
    assert joined(parser.feed(before) + parser.feed(held)) == [before] * bool(before)
    assert joined(parser.finish()) == [held]


LONG = "abcdefg\\n" * 1000
LONG_TEXTS = [
    (HermesParser, f'<tool_call>{{"name": "f", "arguments": {{"a": "{LONG}"}}}}</tool_call>'),
    (HermesParser, f'<tool_call>{{"arguments": {{"a": "{LONG}"}}, "name": "f"}}</tool_call>'),
    (HermesParser, "<tool_call>" * 500),
    (HermesParser, "<tool_cal" * 500),
    (Llama3JsonParser, f'{{"name": "f", "parameters": {{"a": "{LONG}"}}}}'),
    (Llama3JsonParser, '{"name": "f", "parameters": {"a": ' + "[" * 5000),
    (MistralParser, f'[TOOL_CALLS]f[ARGS]{{"a": "{LONG}"}}'),
    (MistralParser, f"[TOOL_CALLS]{'f' * 5000}"),
    (MistralParser, "[TOOL_CALLS]" * 500),
    (PythonicParser, f'[f(a="{LONG}")]'),
    (PythonicParser, "[f(a=" + "(" * 5000),
    (PythonicParser, "[f(a=" + "[" * 5000),
    (PythonicParser, "[f(a=" + "9" * 5000 + ")]"),
    (PythonicParser, "[f(" + "a" * 5000),
]


@pytest.mark.parametrize(("format_", "text"), LONG_TEXTS)
def test_no_text_is_looked_at_again_with_each_piece(format_: Format, text: str) -> None:
    parser = format_(NAMES)
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    calls_of_pieces: list[int] = []
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    for piece in pieces:
        num_calls = 0
        sys.setprofile(count)
        parser.feed(piece)
        sys.setprofile(None)
        calls_of_pieces.append(num_calls)
        # what is copied with the next piece
        assert len(parser._cursor._text) - parser._cursor._at < len("<|python_start|>")
    assert statistics.median(calls_of_pieces) < 200  # a collection of garbage counts, too
    parser.finish()


def test_depth_is_no_matter() -> None:
    deep = '{"a":' * 5_000 + "1" + "}" * 5_000
    assert joined(parts_of(HermesParser, [f'<tool_call>{{"name": "f", "arguments": {deep}}}'])) == [
        ("f", deep)
    ]
    assert joined(parts_of(MistralParser, [f"[TOOL_CALLS]f{deep}"])) == [("f", deep)]
    lists, tuples = "[" * 5_000 + "]" * 5_000, "(" * 5_000 + ")" * 5_000
    assert joined(parts_of(PythonicParser, [f"[f(a={lists})]"])) == [("f", f'{{"a": {lists}}}')]
    assert joined(parts_of(PythonicParser, [f"[f(a={tuples})]"])) == [("f", '{"a": []}')]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.booleans(), st.integers(0, 3), st.randoms())
def test_all_of_json_passes_to_the_byte(
    arguments: dict[str, Any], is_ascii: bool, indent: int, source: random.Random
) -> None:
    text = json.dumps(arguments, ensure_ascii=is_ascii, indent=indent or None)
    assert is_json_object(text)
    assert not is_json_object(text + "}")
    assert not is_json_object(text[:-1])
    for format_, message in (
        (HermesParser, f'a<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>b'),
        (HermesParser, f'a<tool_call>{{"arguments": {json.dumps(text)}, "name": "f"}}</tool_call>b'),
        (MistralParser, f"a[TOOL_CALLS]f[ARGS]{text}b"),
    ):
        assert joined(parts_of(format_, cut(message, source))) == ["a", ("f", text), "b"]


@settings(max_examples=60, deadline=None)
@given(JSON_VALUES, st.randoms())
def test_what_python_writes_becomes_the_json_of_the_same_value(value: Any, source: random.Random) -> None:
    (call,) = joined(parts_of(PythonicParser, cut(f"[f(a={value!r})]", source)))
    assert isinstance(call, tuple)
    assert json.loads(call[1]) == {"a": value}


@settings(max_examples=60, deadline=None)
@given(st.text('{}[]",:\\u0aeE1.-+tfnrulse \n', max_size=8))
def test_the_scanner_agrees_with_the_standard_library(text: str) -> None:
    text = text.strip(" \n") + " "  # a number has ended when something else comes
    try:
        json.loads(text, parse_constant=lambda name: json.loads(f"<{name}>"))
        is_valid = True
    except ValueError:
        is_valid = False
    scanner = JsonScanner()
    end = scanner.scan(text)
    assert (scanner.is_complete and not text[end:].strip()) == is_valid


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *(("0", "0"), ("-0", "-0"), ("1_000", "1000"), ("1.", "1.0"), (".5", "0.5"), ("-.5e+7", "-0.5e+7")),
        *(
            ("1E5", "1E5"),
            ("0x1F", "31"),
            ("-0b11", "-3"),
            ("0o17", "15"),
            ("True", "true"),
            ("null", "null"),
        ),
        *(
            (word, None)
            for word in ("", "-", ".", "+.e1", "007", "1__0", "_1", "1e", "0x", "1-2", "TRUE", "nan")
        ),
        *((word, None) for word in ("inf", "1j", "１", "0x" + "f" * 200)),
    ],
)
def test_constants_of_python_become_those_of_json(word: str, expected: str | None) -> None:
    assert as_json(word) == expected
    if expected is not None:
        json.loads(expected)
