"""Grammars of the llguidance library: from a StructuredOutput to allowed tokens.

llguidance was measured against xgrammar: see docs/STRUCTURED_OUTPUT.md. It computes masks lazily with
derivatives of regular expressions and an Earley parser, so there is little to compile, and what a
token may cost in a step is bounded by the library's own limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from engine_service.structured_output.grammar import PackedMask, refused
from engine_service.structured_output.json_schema import ReadySchema, make_ready
from shared.sampling import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # there for type checkers only

# The library descends recursively into rules and references. With these sizes the deepest chain of
# them ends well on the stack of large_stack.py; on the usual 8 MiB one of 3,000 references crashes.
MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024

_MAX_CHOICES = 4096
_MAX_MESSAGE_CHARACTERS = 400
# Room for the indentation of a deep document. Without a bound a small model can write blanks for ever.
_WHITESPACE = r"[ \t\r\n]{0,64}"
# All but \uXXXX, which would let a property come under its name in disguise, past its schema. The few
# control characters that have no other escape cannot be written for it.
_ESCAPES = 'nrbtf\\"'
# Where the library looks for options in a schema, and a rule of a gateway's grammar that is a schema.
_OPTIONS_KEYWORD = "x-guidance"
_SCHEMA_RULE = re.compile(r"^(?P<name>\w+: %json )(?P<schema>\{.*\})$", re.MULTILINE)
_OVERLAPPING_ALTERNATIVES = (
    "the alternatives of a oneOf may overlap, so it cannot be enforced: "
    "use anyOf, or tell them apart by a property with constants"
)


class LlguidanceVocabulary(msgspec.Struct, array_like=True, frozen=True):
    """What grammars need to know of a model. `tokenizer_json` as in TextBundle."""

    tokenizer_json: bytes
    vocab_size: int
    eos_token_ids: list[int]

    def tokenizer(self) -> LLTokenizer:
        """Takes a quarter of a second for 50k tokens. Raises Refusal if the library cannot use it."""
        try:
            return LLTokenizer(
                self.tokenizer_json.decode(), n_vocab=self.vocab_size, eos_token=self.eos_token_ids
            )
        except ValueError as error:
            raise refused(f"this model's tokenizer cannot be used for structured output: {error}") from error


class LlguidanceState:
    """Implements GrammarState."""

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise refused(f"the output cannot be kept in the form: {_summary(self._matcher.get_error())}")

    def mask(self) -> PackedMask | None:
        mask = np.zeros(self._num_mask_bytes, dtype=np.uint8)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return None if self._matcher.is_error() else mask


class LlguidanceGrammar:
    """Implements Grammar. The copies of a matcher share the automaton that they build on the way."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = -(-vocab_size // 32) * 4

    def start(self, output_token_ids: Iterable[int] = ()) -> LlguidanceState:
        state = LlguidanceState(self._matcher.deep_copy(), self._num_mask_bytes)
        for token_id in output_token_ids:
            state.accept(token_id)
        return state


def compile_grammar(tokenizer: LLTokenizer, form: StructuredOutput) -> LlguidanceGrammar:
    """Raises Refusal. Call it in a thread of large_stack.py."""
    matcher = LLMatcher(
        tokenizer, _grammar_text(form), log_level=0, limits=LLParserLimits(verbose_errors=False)
    )
    grammar = LlguidanceGrammar(matcher, tokenizer.vocab_size)
    # The first mask does what the compiler has left to be done, and finds rules that lead nowhere.
    if not matcher.is_error() and (mask := grammar.start().mask()) is not None and mask.any():
        return grammar
    problem = matcher.get_error() or "no output can satisfy it"
    if "oneOf constraints are not supported" in problem:  # and it advises an option of its own
        problem = _OVERLAPPING_ALTERNATIVES
    raise refused(f"the {form.kind} cannot be used: {_summary(problem)}")


def check_size(form: StructuredOutput) -> None:
    """Raises Refusal."""
    # Of "schemas" only these are a client's.
    limit = MAX_SCHEMA_BYTES if form.kind in ("json_schema", "schemas") else MAX_GRAMMAR_BYTES
    size = len(form.text.encode(errors="replace"))
    if size > limit:
        raise refused(f"the {form.kind} has {size} bytes; at most {limit} are allowed")


def schemas_of(form: StructuredOutput) -> Iterator[str]:
    """The JSON schemas that it is, or is made of."""
    if form.kind == "json_schema":
        yield form.text
    elif form.kind == "schemas":
        yield from (rule["schema"] for rule in _SCHEMA_RULE.finditer(form.text))


def _grammar_text(form: StructuredOutput) -> str:
    try:
        match form.kind:
            case "json_schema":
                return _json_grammar(form.text, is_strict=form.is_strict)
            case "json_object":
                return _json_grammar('{"type": "object"}', is_strict=True)
            case "regex":
                # As JSON schemas have it, \\d is 0 to 9, and not each of the 800 digits of Unicode.
                return grammar_from("lark", f"start: /{regex_to_lark(form.text, 'd')}/")
            case "choice":
                return grammar_from("choice", json.dumps(_choices(form.text)))
            case "grammar":
                return grammar_from("grammar", form.text)
            case "schemas":
                return grammar_from("lark", _SCHEMA_RULE.sub(_ready_rule, form.text))
    except ValueError as error:
        raise refused(f"the {form.kind} cannot be used: {_summary(str(error))}") from error


def _json_grammar(schema: str, *, is_strict: bool) -> str:
    ready = make_ready(schema, is_strict=is_strict)
    options = _options(ready, is_strict=is_strict)
    return str(LLMatcher.grammar_from_json_schema(ready.text, overrides=options))


def _ready_rule(rule: re.Match[str]) -> str:
    """The same, with its schema made ready. The gateway's option `lenient` says whether it is strict."""
    schema = json.loads(rule["schema"])
    is_strict = not schema.pop(_OPTIONS_KEYWORD, {}).get("lenient")
    ready = make_ready(json.dumps(schema), is_strict=is_strict)
    options = _options(ready, is_strict=is_strict)
    return rule["name"] + json.dumps({**json.loads(ready.text), _OPTIONS_KEYWORD: options})


def _options(ready: ReadySchema, *, is_strict: bool) -> JsonCompileOptions:
    return {
        "lenient": not is_strict,
        "coerce_one_of": ready.has_exclusive_alternatives or not is_strict,
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
        "json_allowed_escapes": _ESCAPES,
        # As they are without this. A schema may bring options of its own, and none must count.
        "item_separator": ",",
        "key_separator": ":",
    }


def _choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise refused(f"the choice is no list of strings: {error}") from error
    if not 1 <= len(choices) <= _MAX_CHOICES:
        raise refused(f"a choice needs 1 to {_MAX_CHOICES} strings, got {len(choices)}")
    return choices


def _summary(problem: str) -> str:
    """One line of it. Where it shows an expression that cannot be parsed, the reason comes after that."""
    lines = problem.strip().split("\n")
    if lines[0].endswith(":"):
        reasons = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
        lines[0] = f"{lines[0]} {next(reasons, '')}".rstrip()
    return lines[0][:_MAX_MESSAGE_CHARACTERS]
