"""How the next token is chosen: the parameters, under vLLM's names, as they cross the wire."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from shared.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay numbers
GREEDY_BELOW_TEMPERATURE = 1e-5  # there one token has all the probability; vLLM treats it so, too
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256  # token sequences: a word may need two, see gateway/openai/sampling.py
MAX_BAD_WORD_TOKENS = 1024
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10.0
# Nothing is drawn, so any seed gives what it always gives.
_HEEDED_BY_BEAM_SEARCH = ("max_tokens", "seed", "temperature", "stop_token_ids", "ignore_eos", "beam_search")


StructuredOutputKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "schemas"]


class StructuredOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A form that the output must have. `text` is what `kind` says: a JSON schema, a regular
    expression, a JSON list of strings to choose from, a Lark or GBNF grammar; empty for `json_object`.
    "schemas" is a Lark grammar that a gateway has made of a client's schemas."""

    kind: StructuredOutputKind
    text: str = ""
    is_strict: bool = False  # of a JSON schema: refuse what cannot be enforced, instead of ignoring it


class BeamSearch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Look for the most probable continuations instead of drawing one; see engine_service/beam_search.py."""

    width: int  # continuations that are followed at once, and that are told in the end
    length_penalty: float = 1.0  # sums are divided by the length to this power; the higher, the longer


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Parameters of one sequence. New fields go to the end, with a default: the wire is positional."""

    max_tokens: int
    seed: int  # the gateway draws one when the client gives none, so every sequence can be replayed
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only, as OpenAI defines it
    frequency_penalty: float = 0.0  # over output only
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    min_tokens: int = 0
    ignore_eos: bool = False
    structured_output: StructuredOutput | None = None
    logprobs: int | None = None  # so many most likely tokens beside each chosen one; None: not even its own
    allowed_token_ids: tuple[int, ...] = ()  # no others may come; empty: all may
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    prompt_logprobs: int | None = None  # as `logprobs`, of the tokens of the prompt
    beam_search: BeamSearch | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the field, unless every value is one the engine can run."""
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("seed", self.seed, 0, MAX_SEED)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequest(
                f"logit_bias may have at most {MAX_LOGIT_BIAS_ENTRIES} entries", "logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", token_id, 0, vocab_size - 1)
            _in_range("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} entries", "stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, vocab_size - 1)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            message = f"allowed_token_ids may have at most {MAX_ALLOWED_TOKEN_IDS} entries"
            raise InvalidRequest(message, "allowed_token_ids")
        for token_id in self.allowed_token_ids:
            _in_range("allowed_token_ids", token_id, 0, vocab_size - 1)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words may have at most {MAX_BAD_WORDS} token sequences", "bad_words")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                message = f"each of bad_words has at least 1 and at most {MAX_BAD_WORD_TOKENS} tokens"
                raise InvalidRequest(message, "bad_words")
            for token_id in word:
                _in_range("bad_words", token_id, 0, vocab_size - 1)
        if self.beam_search is not None:
            _in_range("beam_width", self.beam_search.width, 1, MAX_BEAM_WIDTH)
            penalty = self.beam_search.length_penalty
            _in_range("length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
            self._refuse_what_beam_search_ignores()

    def _refuse_what_beam_search_ignores(self) -> None:
        """It ranks by the model's own distribution, whatever else is asked for."""
        if not (self.is_greedy or self.temperature == 1.0):
            raise InvalidRequest(
                "a beam search knows no temperature but 0 and 1, which are the same", "temperature"
            )
        left_out = SamplingParams(self.max_tokens, self.seed, top_k=min(self.top_k, 0))
        for name in self.__struct_fields__:
            if name not in _HEEDED_BY_BEAM_SEARCH and getattr(self, name) != getattr(left_out, name):
                raise InvalidRequest(f"a beam search does not heed {name}", name)


def _in_range(param: str, value: float, low: float, high: float, *, low_is_open: bool = False) -> None:
    too_low = value <= low if low_is_open else value < low
    if too_low or value > high or math.isnan(value):  # last: a large integer would not fit into a float
        bounds = f"{'above' if low_is_open else 'at least'} {low} and at most {high}"
        raise InvalidRequest(f"{param} must be {bounds}, got {value}", param)
