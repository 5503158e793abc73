"""A variant adds what the client left open, and changes nothing that the client has set."""

from typing import Any

import pytest

from gateway.anthropic.body import MessagesBody
from gateway.anthropic.translation import chat_body_of
from gateway.openai.schema import ChatCompletionBody, CompletionBody, check_body
from gateway.openai.variant_fields import as_variant_asks
from shared.config import VariantConfig

USER = {"role": "user", "content": "hello"}


def variant(**fields: Any) -> VariantConfig:
    return VariantConfig.model_validate({"variant": "v", "model": "m", **fields})


def chat(*messages: dict[str, Any], **fields: Any) -> ChatCompletionBody:
    return check_body(ChatCompletionBody, {"model": "m", "messages": list(messages or [USER]), **fields})


def said(body: ChatCompletionBody) -> list[tuple[str, str | None]]:
    return [(message.role, message.text) for message in body.messages]


def test_sampling_that_the_client_leaves_open_is_the_variants():
    defaults = variant(
        sampling={"temperature": 0.0, "top_k": 5, "presence_penalty": 1.0, "seed": 7, "stop": ["x"]}
    )
    wish = as_variant_asks(chat(), defaults)
    assert (wish.temperature, wish.top_k, wish.presence_penalty, wish.seed) == (0.0, 5, 1.0, 7)
    assert wish.stop_strings == ["x"]
    assert as_variant_asks(check_body(CompletionBody, {"model": "m", "prompt": "x"}), defaults).top_k == 5


def test_what_the_client_has_set_stays_also_where_that_is_the_apis_default():
    defaults = variant(sampling={"temperature": 0.0, "top_k": 5, "top_p": 0.5})
    wish = as_variant_asks(chat(temperature=1, top_k=0, top_p=None), defaults)
    assert (wish.temperature, wish.top_k) == (1, 0)
    assert wish.top_p == 0.5  # null: it is left to us


def test_a_beam_search_gets_no_default_that_it_would_be_refused_for():
    defaults = variant(sampling={"temperature": 0.5, "top_k": 5, "stop": ["x"], "seed": 3})
    wish = as_variant_asks(chat(use_beam_search=True), defaults)
    assert (wish.temperature, wish.top_k, wish.stop, wish.seed) == (None, 0, None, 3)


def test_a_system_prompt_is_a_message_of_its_own_where_the_client_has_none():
    assert said(as_variant_asks(chat(), variant(system_prompt="Be brief."))) == [
        ("system", "Be brief."),
        ("user", "hello"),
    ]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", ["Be kind.", [{"type": "text", "text": "Be kind."}]])
def test_it_goes_before_the_clients_own_in_one_message_with_it(role: str, content: Any):
    wish = as_variant_asks(chat({"role": role, "content": content}, USER), variant(system_prompt="Be brief."))
    assert said(wish) == [(role, "Be brief.\n\nBe kind."), ("user", "hello")]


def test_it_goes_before_the_system_prompt_of_other_apis_too():
    body = check_body(MessagesBody, {"model": "m", "max_tokens": 5, "system": "Be kind.", "messages": [USER]})
    wish = as_variant_asks(chat_body_of(body), variant(system_prompt="Be brief."))
    assert said(wish)[0] == ("system", "Be brief.\n\nBe kind.")


def test_two_variants_that_are_tried_for_one_request_do_not_see_each_others_fields():
    asked = chat()
    as_variant_asks(asked, variant(sampling={"temperature": 0.0}, system_prompt="Be brief."))
    assert as_variant_asks(asked, variant()) == asked == chat()
