"""From the fields of a request to the parameters an engine understands."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import context_length_exceeded, from_user_error, invalid_request
from gateway.limits.dimensions import Bound
from gateway.limits.refusal import output_too_long
from gateway.openai.schema import GenerationBody
from shared.errors import InvalidRequest
from shared.identifiers import random_hex
from shared.messages import ModelCard
from shared.sampling import MAX_SEED, SamplingParams, StructuredOutput
from shared.tokenizer import Tokenizer

# In one answer, where each takes up to 80 bytes. 64 prompts of 2047 tokens with one alternative each
# just fit.
MAX_PROMPT_LOGPROBS = 2**18


def sampling_of(
    body: GenerationBody,
    card: ModelCard,
    prompt_lengths: Sequence[int],
    prompt_param: str,
    *,
    form: StructuredOutput | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    default_max_tokens: int | None = None,
    bound: Bound | None = None,
) -> SamplingParams:
    """`form` is what the output is held to; `bad_words` are those of the body as tokens. Where the client
    names no length, `default_max_tokens` goes before the endpoint's own, as far as there is room. `bound` is
    the limit of who asks.

    Raises ApiError 400 for values that this model cannot run, the context length among them.
    """
    longest = max(prompt_lengths)
    if longest >= card.max_model_len:
        raise context_length_exceeded(
            f"This model's maximum context length is {card.max_model_len} tokens, "
            f"but the prompt has {longest}.",
            prompt_param,
        )
    room = card.max_model_len - longest
    if body.max_output_tokens is None:
        default = default_max_tokens or body.default_output_tokens
        max_tokens = room if default is None else min(room, default)
        if bound is not None:  # nobody has asked for more
            max_tokens = min(max_tokens, bound.num_tokens)
    else:
        max_tokens = body.max_output_tokens
        if bound is not None and max_tokens > bound.num_tokens:
            raise output_too_long(max_tokens, bound, body.max_output_param)
    if max_tokens > room:
        raise context_length_exceeded(
            f"This model's maximum context length is {card.max_model_len} tokens, but the prompt "
            f"has {longest} and {max_tokens} more were asked for.",
            "max_tokens",
        )
    _refuse_too_many_scores(body, sum(prompt_lengths))
    logprobs = body.num_logprobs
    if logprobs is None and body.num_candidates > body.n:
        logprobs = 0  # which are the best?
    sampling = SamplingParams(
        max_tokens=max(max_tokens, 1),  # an engine generates at least one token
        seed=int(random_hex(8), 16) >> 1 if body.seed is None else body.seed & MAX_SEED,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop_token_ids=tuple(body.stop_token_ids),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        structured_output=form,
        logprobs=logprobs,
        allowed_token_ids=tuple(body.allowed_token_ids),
        bad_words=bad_words,
        prompt_logprobs=body.num_prompt_logprobs,
        beam_search=body.beam_search,
    )
    try:
        sampling.check(card.vocab_size)
    except InvalidRequest as error:
        raise from_user_error(error) from error
    return sampling


def refuse_too_long(num_characters: int, tokenizer: Tokenizer, card: ModelCard, param: str) -> None:
    """Raises ApiError 400 for a text that cannot fit, before the work of tokenising megabytes of it."""
    at_least = tokenizer.min_num_tokens(num_characters)
    if at_least >= card.max_model_len:
        raise context_length_exceeded(
            f"This model's maximum context length is {card.max_model_len} tokens, "
            f"but the prompt has at least {at_least}.",
            param,
        )


def check_token_ids(prompts: Sequence[Sequence[int]], card: ModelCard) -> None:
    for token_ids in prompts:
        if max(token_ids) >= card.vocab_size:
            raise invalid_request(f"Token ids must be below {card.vocab_size}.", "prompt", "invalid_value")


def _refuse_too_many_scores(body: GenerationBody, num_prompt_tokens: int) -> None:
    """Raises ApiError 400: they are held in memory as a whole, and are a large multiple of the request."""
    if body.num_prompt_logprobs is None:
        return
    num_scores = num_prompt_tokens * (body.num_prompt_logprobs + 1) * body.num_prompt_copies
    if num_scores > MAX_PROMPT_LOGPROBS:
        raise invalid_request(
            f"The log-probabilities of {num_prompt_tokens} prompt tokens and of "
            f"{body.num_prompt_logprobs} alternatives to each would be {num_scores} in this answer; "
            f"it may have {MAX_PROMPT_LOGPROBS}.",
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
            "invalid_value",
        )


def _logit_bias(by_text: dict[str, float]) -> dict[int, float]:
    """Keys are token ids written as JSON object keys, so as text."""
    biases = {}
    for text, bias in by_text.items():
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise invalid_request(f"{text[:40]!r} is not a token id.", "logit_bias", "invalid_value")
        biases[int(text)] = bias
    return biases
