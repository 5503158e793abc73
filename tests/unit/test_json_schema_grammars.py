"""What a JSON schema allows is what can be written: where the grammar library alone would let more pass."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from engine_service.refusal import Refusal
from engine_service.structured_output.json_schema import make_ready
from engine_service.structured_output.llguidance_grammar import schemas_of
from engine_service.structured_output.special_texts import refuse_special_texts, special_texts
from gateway.openai.tools.call_grammar import json_of
from shared.byte_text import byte_text_bundle
from shared.sampling import StructuredOutput
from shared.tokenizer import Tokenizer
from tests.unit.chat_models import END, text_bundle
from tests.unit.grammar_worlds import InProcessCompiler, form

TOKENIZER = Tokenizer(byte_text_bundle())
COMPILER = InProcessCompiler(byte_text_bundle())


def member(kind: Any, *names: str, requires_kind: bool = True, **more: Any) -> dict[str, Any]:
    properties = {"kind": kind, **{name: {"type": "integer"} for name in names}}
    required = [*(["kind"] if requires_kind else []), *names]
    return {"type": "object", "properties": properties, "required": required, **more}


DATE = {"type": "string", "format": "date"}
DATE_TIME = {"type": "string", "format": "date-time"}
KEYED = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "additionalProperties": {"type": "integer"},
}
TREE = {
    "$defs": {
        "Leaf": member({"const": "leaf"}, "value", requires_kind=False),
        "Fork": {
            "type": "object",
            "properties": {
                "kind": {"const": "fork"},
                "arms": {
                    "type": "array",
                    "items": {
                        "discriminator": {"propertyName": "kind"},
                        "oneOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Fork"}],
                    },
                },
            },
            "required": ["arms"],
        },
    },
    "$ref": "#/$defs/Fork",
}

# Texts that can be written, and texts that cannot.
KEPT: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a name in disguise": (KEYED, ['{"a":"x","b":1}', '{"\\n":1}'], ['{"\\u0061":1}']),
    "a pattern's name in disguise": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "string"}},
            "additionalProperties": {"type": "integer"},
        },
        ['{"xa":"b","a":1}', '{"xa":"b"}'],
        ['{"\\u0078a":1}'],
    ),
    "dates": (
        DATE,
        ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"1999-12-31"', '"0001-01-01"'],
        ['"2023-02-29"', '"1900-02-29"', '"2023-02-30"', '"0000-01-01"', '"2023-04-31"'],
    ),
    "times on dates": (
        DATE_TIME,
        ['"2024-02-29T23:59:59Z"', '"2023-10-01T00:00:00.5+02:00"'],
        ['"2023-02-29T23:59:59Z"', '"0000-01-01T00:00:00Z"'],
    ),
    "dates with a pattern of their own": (
        {**DATE, "pattern": "^20"},
        ['"2024-02-29"'],
        ['"2023-02-29"', '"1924-02-29"'],
    ),
    "a property that is called format": (
        {"type": "object", "properties": {"format": {"const": "date"}}, "required": ["format"]},
        ['{"format":"date"}'],
        ['{"format":"day"}'],
    ),
    "a constant that looks like a date's schema": (
        {"const": {"format": "date"}},
        ['{"format":"date"}'],
        ['{"format":"date","pattern":""}'],
    ),
    "options of the library": (
        {
            "type": "array",
            "items": {"type": "integer"},
            "x-guidance": {"item_separator": ";", "lenient": True},
        },
        ["[1,2]"],
        ["[1;2]"],
    ),
    "at least one name": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        ['{"a":1}'],
        ["{}"],
    ),
    "alternatives of different types": (
        {"oneOf": [{"type": ["integer", "null"]}, {"enum": ["a", True]}, {"type": "array", "maxItems": 0}]},
        ["7", '"a"', "[]", "true"],
        ['"b"', "false"],
    ),
    "alternatives with a constant each": (
        {"oneOf": [member({"const": "a"}, "x"), member({"enum": ["b", "c"]}, "y")]},
        ['{"kind":"a","x":1}', '{"kind":"c","y":1}'],
        ['{"kind":"a","y":1}'],
    ),
    "alternatives with a name of their own": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
            ]
        },
        ['{"a":1}', '{"b":1}', "{}"],
        ['{"a":1,"b":1}'],
    ),
    "alternatives under a reference, told apart by what may be absent": (
        TREE,
        ['{"kind":"fork","arms":[{"kind":"leaf","value":1},{"kind":"fork","arms":[]}]}'],
        ['{"arms":[]}', '{"kind":"fork","arms":[{"value":1}]}'],
    ),
    "alternatives with two constants, of which one tells them apart": (
        {
            "oneOf": [
                {"type": "object", "properties": {"version": {"const": 1}, "kind": {"const": kind}}}
                for kind in ("a", "b")
            ]
        },
        ['{"kind":"a"}', '{"version":1,"kind":"b"}'],
        ["{}", '{"version":1}'],
    ),
    "alternatives that are unions": (
        {
            "oneOf": [
                {"anyOf": [{"type": "string"}, {"type": "null"}]},
                {"allOf": [{"type": ["object", "integer"]}, {"type": ["integer", "string"]}]},
            ]
        },
        ['"a"', "null", "1"],
        ["{}", "true"],
    ),
    "names that are strings": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        ['{"a":1}'],
        ['{"a":"1"}'],
    ),
    "items that need not differ": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        ["[1,1]"],
        ['["a"]'],
    ),
}

REFUSED_WHERE_STRICT = {
    "an integer is a number": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "1 is 1.0": ({"oneOf": [{"enum": [1, "a"]}, {"const": 1.0}]}, "oneOf"),
    "other names are free": (
        {
            "oneOf": [
                {"type": "object", "required": ["a"]},
                {"type": "object", "properties": {"b": {}}, "required": ["b"]},
            ]
        },
        "oneOf",
    ),
    "the other's name fits a pattern": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"]},
                {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False},
            ]
        },
        "oneOf",
    ),
    "what is no object satisfies both": (
        {"oneOf": [{**member({"const": kind}), "type": ["object", "null"]} for kind in "ab"]},
        "oneOf",
    ),
    "a constant that only some have": (
        {"oneOf": [member({"const": "a"}), member({"const": "b"}), {"type": "object"}]},
        "oneOf",
    ),
    "references that do not start at the root": (
        {
            "$defs": {"a": {"const": 1}, "b": {"const": 2}},
            "$id": "https://example.org/outer",
            "properties": {
                "x": {
                    "$id": "https://example.org/inner",
                    "$defs": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                }
            },
        },
        "oneOf",
    ),
    "more alternatives than are compared": (
        {"oneOf": [member({"const": number}) for number in range(300)]},
        "oneOf",
    ),
    "a name may come twice": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        "minProperties",
    ),
    "a name that fits a pattern may come twice": (
        {
            "type": "object",
            "patternProperties": {"^x": {}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        "minProperties",
    ),
    "a look-ahead": ({"type": "string", "pattern": "^(?=a)b$"}, "look-ahead"),
}


def can_be_written(schema: dict[str, Any], text: str, *, is_strict: bool = True) -> bool:
    grammar = COMPILER.compile(form("json_schema", schema, is_strict=is_strict))
    try:
        state = grammar.start(TOKENIZER.encode(text))
    except Refusal:
        return False
    mask = state.mask()
    assert mask is not None
    eos = byte_text_bundle().eos_token_ids[0]
    return bool(mask[eos // 8] >> eos % 8 & 1)


@pytest.mark.parametrize("name", KEPT)
def test_just_what_satisfies_a_schema_can_be_written(name):
    schema, possible, impossible = KEPT[name]
    for text in possible:
        jsonschema.validate(json.loads(text), schema)
        assert can_be_written(schema, text), text
    for text in impossible:
        assert not can_be_written(schema, text), text


@pytest.mark.parametrize("name", REFUSED_WHERE_STRICT)
def test_what_cannot_be_kept_to_is_refused_where_it_is_strict(name):
    schema, word = REFUSED_WHERE_STRICT[name]
    with pytest.raises(Refusal, match=word) as refusal:
        COMPILER.compile(form("json_schema", schema, is_strict=True))
    assert refusal.value.param == "response_format"
    assert "option" not in refusal.value.message, "the library's own options mean nothing to a client"
    if word != "look-ahead":
        COMPILER.compile(form("json_schema", schema))


def call_form(schema: dict[str, Any], *, is_strict: bool) -> StructuredOutput:
    """As the gateway writes the arguments of a tool."""
    return StructuredOutput("schemas", f"start: arguments\narguments: {json_of(schema, is_strict=is_strict)}")


def test_arguments_of_tools_are_kept_to_like_answers():
    schema, (possible, *_), (impossible, *_) = KEPT["a name in disguise"]
    for is_strict in (True, False):
        grammar = COMPILER.compile(call_form(schema, is_strict=is_strict))
        grammar.start(TOKENIZER.encode(possible))
        with pytest.raises(Refusal):
            grammar.start(TOKENIZER.encode(impossible))
    for schema, word in REFUSED_WHERE_STRICT.values():
        with pytest.raises(Refusal, match=word):
            COMPILER.compile(call_form(schema, is_strict=True))


def test_hundred_members_of_a_union_are_told_apart():
    schema = {"oneOf": [member({"const": f"kind {number}"}, requires_kind=False) for number in range(100)]}
    assert can_be_written(schema, '{"kind":"kind 99"}')
    assert not can_be_written(schema, "{}")


def random_schema(draw: random.Random, depth: int = 2, *, may_refer: bool = True) -> dict[str, Any]:
    """Over a few small documents."""

    def inner() -> dict[str, Any]:
        return random_schema(draw, depth - 1, may_refer=may_refer)

    schema: dict[str, Any] = {}
    if draw.random() < 0.7:
        types = ["null", "boolean", "integer", "number", "string", "object"]
        schema["type"] = draw.sample(types, draw.randint(1, 2)) if draw.random() < 0.3 else draw.choice(types)
    if draw.random() < 0.3:
        schema["enum"] = draw.sample([None, True, 1, 1.0, 1.5, "a", "b", {}, {"p": 1}], draw.randint(1, 3))
    if depth and draw.random() < 0.5:
        schema["properties"] = {name: inner() for name in draw.sample("pq", 1)}
    if draw.random() < 0.5:
        schema["required"] = draw.sample("pq", draw.randint(1, 2))
    if depth and draw.random() < 0.4:
        schema["additionalProperties"] = draw.choice([False, inner()])
    if depth and draw.random() < 0.3:
        keyword = draw.choice(["anyOf", "allOf"])
        schema[keyword] = [inner() for _ in range(draw.randint(1, 2))]
    if depth and may_refer and draw.random() < 0.2:
        schema = {"$ref": f"#/$defs/{draw.choice('ab')}"}
    return schema


def test_alternatives_that_are_found_to_be_exclusive_are():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    simple = [None, True, 1, 1.5, "a", "b", {}]
    documents = [
        *simple,
        *({name: value} for name in "pqr" for value in simple),
        *({"p": one, "q": other} for one, other in itertools.product(simple, simple)),
    ]
    num_exclusive = 0
    for _ in range(400):
        schema = {
            "$defs": {name: random_schema(draw, 1, may_refer=False) for name in "ab"},
            "oneOf": [random_schema(draw) for _ in range(2)],
        }
        ready = make_ready(json.dumps(schema), is_strict=False)
        if not ready.has_exclusive_alternatives:
            continue
        num_exclusive += 1
        made = json.loads(ready.text)  # where a tag may have become required
        alternatives = [
            jsonschema.Draft202012Validator({"$defs": made["$defs"], **alternative})
            for alternative in made["oneOf"]
        ]
        for document in documents:
            assert sum(alternative.is_valid(document) for alternative in alternatives) < 2, (schema, document)
    assert num_exclusive > 40


@pytest.mark.parametrize(
    "text", ["[" * 50_000, '{"a":' * 5000 + "1" + "}" * 5000, "{", "NaN", '{"type":"strin"}']
)
def test_what_is_no_schema_is_left_to_the_library(text):
    with pytest.raises(Refusal) as refusal:
        COMPILER.compile(form("json_schema", text, is_strict=True))
    assert refusal.value.param == "response_format"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"enum": [1, 2**53 + 1]}, "9007199254740993"),
        ({"const": {"id": -(2**60)}}, "beyond"),
        ({"const": "a\0b"}, "control character"),
        ({"enum": [["\x7f"]]}, "control character"),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_value_that_would_come_out_as_another_one_is_refused(value, word, is_strict):
    schema = {"type": "object", "properties": {"a": value}}
    with pytest.raises(Refusal, match=word):
        COMPILER.compile(form("json_schema", schema, is_strict=is_strict))


def test_bounds_beyond_what_can_be_counted_are_refused_where_strict():
    schema = {"type": "integer", "maximum": 2**53 + 1}
    COMPILER.compile(form("json_schema", schema))
    with pytest.raises(Refusal, match="beyond"):
        COMPILER.compile(form("json_schema", schema, is_strict=True))


SPECIAL = ("<|im_end|>", "<|x|>")


def says_special(structured_output: StructuredOutput) -> bool:
    try:
        refuse_special_texts(structured_output, schemas_of(structured_output), SPECIAL)
    except Refusal as refusal:
        return "special token" in refusal.message
    return False


@pytest.mark.parametrize(
    "structured_output",
    [
        form("json_schema", {"enum": ["say <|im_end|> now"]}),
        form("json_schema", {"properties": {"<|x|>": {}}}),
        form("json_schema", {"items": {"anyOf": [{"type": "string", "pattern": "^<\\|im_end\\|>$"}]}}),
        form("json_schema", {"$defs": {"a": {"const": {"b": "<|x|>"}}}, "$ref": "#/$defs/a"}),
        form("choice", json.dumps(["a", "b<|x|>"])),
        form("regex", r"a<\|x\|>"),
        form("grammar", 'start: "a <|x|>"'),
        form("schemas", "start: answer\nanswer: " + json_of({"const": "<|x|>"}, is_strict=True)),
    ],
)
def test_a_form_that_wants_the_text_of_a_special_token_is_refused(structured_output):
    assert says_special(structured_output)


@pytest.mark.parametrize(
    "structured_output",
    [
        form("json_schema", {"type": "string", "description": "never <|im_end|>"}),
        form("json_schema", {"enum": ["<|im_", "end|>"]}),
        form("grammar", 'start: "a" <|x|>'),
        form("regex", "[<|x>]"),
    ],
)
def test_a_form_that_only_mentions_a_special_token_is_not(structured_output):
    assert not says_special(structured_output)


def test_the_special_tokens_are_those_of_the_model():
    bundle = text_bundle(special=["<|x|>"], added=["<tool_call>"])
    assert set(special_texts(bundle.tokenizer_json)) == {"<|x|>", END}
