"""Grammars of the llguidance library: from a StructuredOutput to allowed tokens.

llguidance was measured against xgrammar: see docs/STRUCTURED_OUTPUT.md. It computes masks lazily with
derivatives of regular expressions and an Earley parser, so there is little to compile, and what a
token may cost in a step is bounded by the library's own limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from engine_service.structured_output.grammar import PackedMask, refused
from shared.sampling import StructuredOutput

# The library descends recursively into rules and references. With these sizes the deepest chain of
# them ends well on the stack of large_stack.py; on the usual 8 MiB one of 3,000 references crashes.
MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024

_MAX_CHOICES = 4096
_MAX_MESSAGE_CHARACTERS = 400
# Room for the indentation of a deep document. Without a bound a small model can write blanks for ever.
_WHITESPACE = r"[ \t\r\n]{0,64}"


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
            raise refused(f"the output cannot be kept in the form: {_first_line(self._matcher.get_error())}")

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
    raise refused(f"the {form.kind} cannot be used: {_first_line(problem)}")


def check_size(form: StructuredOutput) -> None:
    """Raises Refusal."""
    # Of "schemas" only these are a client's.
    limit = MAX_SCHEMA_BYTES if form.kind in ("json_schema", "schemas") else MAX_GRAMMAR_BYTES
    size = len(form.text.encode(errors="replace"))
    if size > limit:
        raise refused(f"the {form.kind} has {size} bytes; at most {limit} are allowed")


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
                return grammar_from("lark", form.text)
    except ValueError as error:
        raise refused(f"the {form.kind} cannot be used: {_first_line(str(error))}") from error


def _json_grammar(schema: str, *, is_strict: bool) -> str:
    return str(
        LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "lenient": not is_strict,
                "coerce_one_of": True,
                "whitespace_flexible": True,
                "whitespace_pattern": _WHITESPACE,
            },
        )
    )


def _choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise refused(f"the choice is no list of strings: {error}") from error
    if not 1 <= len(choices) <= _MAX_CHOICES:
        raise refused(f"a choice needs 1 to {_MAX_CHOICES} strings, got {len(choices)}")
    return choices


def _first_line(problem: str) -> str:
    return problem.strip().split("\n", 1)[0][:_MAX_MESSAGE_CHARACTERS]
