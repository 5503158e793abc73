"""Bodies that cannot work are refused at the door, with the field named."""

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.openai.sampling import sampling_of
from gateway.openai.schema import ChatCompletionBody, CompletionBody, check_body
from shared.byte_text import byte_text_bundle
from shared.messages import ModelCard
from shared.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
CARD = ModelCard("m", "llama", 1000, 64, 8, 16, 100, "float32", [2])


def chat(**fields):
    return {"model": "m", "messages": [USER], **fields}


def part(text):
    return {"type": "text", "text": text}


def refusal(kind, document) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_body(kind, document)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ([], None),
        (1, None),
        (None, None),
        ({"messages": [USER]}, "model"),
        ({"model": "m"}, "messages"),
        (chat(model=7), "model"),
        (chat(model=""), "model"),
        (chat(messages=[]), "messages"),
        (chat(messages=None), "messages"),
        (chat(messages={}), "messages"),
        (chat(messages=[1]), "messages[0]"),
        (chat(messages=[{"role": "wizard", "content": "hi"}]), "messages[0].role"),
        (chat(messages=[{"role": 7, "content": "hi"}]), "messages[0].role"),
        (chat(messages=[{"role": "user"}]), "messages[0]"),
        (chat(messages=[USER, {"role": "user", "content": 5}]), "messages[1].content"),
        (chat(messages=[{"role": "user", "content": []}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
        (chat(stream="yes"), "stream"),
        (chat(n=0), "n"),
        (chat(n=-1), "n"),
        (chat(n=10**9), "n"),
        (chat(n="2"), "n"),
        (chat(n=True), "n"),
        (chat(temperature=float("nan")), "temperature"),
        (chat(temperature=-1), "temperature"),
        (chat(temperature="hot"), "temperature"),
        (chat(top_p=0), "top_p"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=2**64), "max_tokens"),
        (chat(max_tokens=-(2**63)), "max_tokens"),
        (chat(seed=2**63), "seed"),
        (chat(seed=-(2**64)), "seed"),
        (chat(top_k=2**31), "top_k"),
        (chat(stop=[""] * 2), "stop"),
        (chat(stop=["x"] * 100), "stop"),
        (chat(stop=5), "stop"),
        (chat(stop_token_ids=[2**31]), "stop_token_ids[0]"),
        (chat(logit_bias={"5": "much"}), "logit_bias.5"),
        (chat(tools={}), "tools"),
        (chat(logprobs=1), "logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=float("nan")), "top_logprobs"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(top_logprobs=2, logprobs=False), "top_logprobs"),
        (chat(allowed_token_ids=[2**31]), "allowed_token_ids[0]"),
        (chat(allowed_token_ids=[1] * 4097), "allowed_token_ids"),
        (chat(bad_words="word"), "bad_words"),
        (chat(bad_words=[""]), "bad_words[0]"),
        (chat(bad_words=["x" * 129]), "bad_words[0]"),
        (chat(bad_words=["x"] * 129), "bad_words"),
        (chat(response_format={"type": "xml"}), "response_format.type"),
        (chat(made_up=1), "made_up"),
        (chat(stream_options={"include_usage": 1}), "stream_options.include_usage"),
    ],
)
def test_a_bad_chat_body_is_refused_with_its_field(document, param):
    error = refusal(ChatCompletionBody, document)
    assert error.param is None if param is None else (error.param or "").startswith(param)
    assert error.message


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], 5, None, {}, [-1], [2**40], [[1], "a"]])
def test_a_bad_prompt_is_refused(prompt):
    assert (refusal(CompletionBody, {"model": "m", "prompt": prompt}).param or "").startswith("prompt")


@pytest.mark.parametrize("logprobs", [-1, 6, True, "1", 1.5, float("nan")])
def test_completions_tell_of_at_most_five_alternatives(logprobs):
    assert refusal(CompletionBody, {"model": "m", "prompt": "a", "logprobs": logprobs}).param == "logprobs"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_says_how_many_alternatives_it_wants(fields, wanted):
    body = check_body(ChatCompletionBody, chat(**fields))
    assert sampling_of(body, CARD, [1], "messages").logprobs == wanted


def test_bad_words_are_barred_at_the_start_of_a_text_and_behind_a_space():
    tokenizer = Tokenizer(byte_text_bundle())
    ab = (97, 98)
    assert tokenizer.bad_word_tokens(["ab", "  ab", "\n"]) == (ab, (32, *ab), (10,), (32, 10))
    assert tokenizer.bad_word_tokens([]) == ()


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1, 2], [3]]])
def test_all_four_forms_of_a_prompt_are_taken(prompt):
    assert check_body(CompletionBody, {"model": "m", "prompt": prompt}).prompt == prompt


def test_what_the_official_client_always_sends_is_taken():
    body = check_body(
        ChatCompletionBody,
        chat(
            messages=[{"role": "developer", "content": [part("be "), part("kind")]}],
            n=1, logprobs=False, store=False, metadata={"a": "b"}, user="u", temperature=1,
        ),
    )  # fmt: skip
    assert body.messages[0].for_template() == {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "param", "code"),
    [
        ({}, 64, "messages", "context_length_exceeded"),
        ({"max_tokens": 60}, 5, "max_tokens", "context_length_exceeded"),
        ({"logit_bias": {"1000": 1.0}}, 5, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1.0}}, 5, "logit_bias", "invalid_value"),
        ({"logit_bias": {"٣": 1.0}}, 5, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 1000.0}}, 5, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [1000]}, 5, "stop_token_ids", "invalid_value"),
        ({"allowed_token_ids": [1000]}, 5, "allowed_token_ids", "invalid_value"),
        ({"min_tokens": 5, "max_tokens": 4}, 5, "min_tokens", "invalid_value"),
    ],
)
def test_what_this_model_cannot_run_is_refused(fields, prompt_tokens, param, code):
    body = check_body(ChatCompletionBody, chat(**fields))
    with pytest.raises(ApiError) as caught:
        sampling_of(body, CARD, [prompt_tokens], "messages")
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_the_default_length_of_an_answer_fills_the_context():
    assert sampling_of(check_body(ChatCompletionBody, chat()), CARD, [10], "messages").max_tokens == 54
    completion = check_body(CompletionBody, {"model": "m", "prompt": "a"})
    assert sampling_of(completion, CARD, [10], "prompt").max_tokens == 16


def test_negative_seeds_are_seeds_too():
    seeds = {
        sampling_of(check_body(ChatCompletionBody, chat(seed=seed)), CARD, [1], "messages").seed
        for seed in (-1, -(2**63), 0, 2**63 - 1)
    }
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_error_says_whether_trying_again_helps():
    error = refusal(ChatCompletionBody, [])
    assert error.headers == {"x-should-retry": "false"}
    assert msgspec.json.encode(error.body)


def test_null_means_the_default_wherever_a_client_may_leave_a_field_out():
    names = [name for name, field in ChatCompletionBody.model_fields.items() if not field.is_required()]
    body = check_body(ChatCompletionBody, chat(**dict.fromkeys(names)))
    assert (body.n, body.stream, body.top_k, body.repetition_penalty) == (1, False, 0, 1.0)


def test_one_request_starts_a_bounded_number_of_sequences():
    error = refusal(CompletionBody, {"model": "m", "prompt": ["a"] * 64, "n": 16})
    assert "128" in error.message


def test_a_default_length_is_cut_to_what_fits_and_a_wanted_one_is_not():
    completion = check_body(CompletionBody, {"model": "m", "prompt": "a"})
    assert sampling_of(completion, CARD, [60], "prompt").max_tokens == 4
    wanted = check_body(CompletionBody, {"model": "m", "prompt": "a", "max_tokens": 16})
    with pytest.raises(ApiError):
        sampling_of(wanted, CARD, [60], "prompt")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "at least 1 item"), ([-1], "greater than or equal to 0"), (["a"] * 65, "at most 64 items")],
)
def test_the_reason_given_is_about_the_form_that_was_meant(prompt, reason):
    assert reason in refusal(CompletionBody, {"model": "m", "prompt": prompt}).message
