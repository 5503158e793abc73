"""LiteLLM's library as a client, for which we are one or another of the servers that it knows."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.conftest import LONG
from tests.real_stack import ABSENT, EMBEDDER, HASTY, MODEL, RealStack

pytestmark = pytest.mark.filterwarnings("ignore")  # about its own code
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
OPENAI = ("openai", "hosted_vllm", "litellm_proxy")  # its names for servers with OpenAI's API


class City(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool


@pytest.fixture(scope="module")
def litellm() -> Any:
    """Imported by whoever uses it: it takes four seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
        import litellm
    litellm.suppress_debug_info = True
    return litellm


@pytest.fixture(scope="module")
def to_openai(real_stack: RealStack) -> dict[str, Any]:
    return {"api_base": real_stack.url + "/v1", "api_key": real_stack.key, "max_retries": 0}


@pytest.fixture(scope="module")
def to_anthropic(real_stack: RealStack) -> dict[str, Any]:
    return {"api_base": real_stack.url, "api_key": real_stack.key}


@pytest.mark.parametrize("server", [*OPENAI, "anthropic"])
def test_a_question_is_answered_streamed_and_whole(litellm, to_openai, to_anthropic, server):
    asked = {"model": f"{server}/{MODEL}", "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    asked |= to_anthropic if server == "anthropic" else to_openai
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert whole.choices[0].finish_reason == "stop"
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


async def test_it_asks_asynchronously_and_keeps_to_a_schema(litellm, to_openai):
    asked = {"model": f"openai/{MODEL}", "messages": QUESTION, "temperature": 0, **to_openai}
    answer = await litellm.acompletion(**asked, max_tokens=100, response_format=City)
    stream = await litellm.acompletion(**asked, max_tokens=100, response_format=City, stream=True)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert City.model_validate_json(streamed) == City.model_validate_json(answer.choices[0].message.content)


def test_completions_responses_and_messages_are_served(litellm, to_openai, to_anthropic):
    completion = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="One, two,", max_tokens=8, **to_openai
    )
    assert completion.usage.completion_tokens == 8
    response = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, temperature=0, **to_openai)
    assert "Paris" in response.output[0].content[0].text


@pytest.mark.parametrize("server", ["openai", "hosted_vllm"])
def test_embeddings_are_those_of_the_texts(litellm, to_openai, server):
    asked = {"model": f"{server}/{EMBEDDER}", **to_openai}
    two = litellm.embedding(**asked, input=["water falls", "fox"])
    one = litellm.embedding(**asked, input=["fox"])
    assert two.data[1]["embedding"] == pytest.approx(one.data[0]["embedding"], abs=1e-5)


@pytest.mark.parametrize("server", ["hosted_vllm", "cohere", "jina_ai"])
def test_documents_are_ranked(litellm, to_openai, to_anthropic, server):
    options = to_anthropic if server == "cohere" else to_openai
    documents = ["fox", "water falls", "the turbine"]
    answer = litellm.rerank(
        model=f"{server}/{EMBEDDER}",
        query="water falls",
        documents=documents,
        top_n=2,
        **{name: options[name] for name in ("api_base", "api_key")},
    )
    assert answer.results[0]["index"] == 1
    assert len(answer.results) == 2


def test_refusals_become_its_own_exceptions(litellm, to_openai, real_stack):
    def ask(**changes: Any) -> Any:
        asked = {"model": f"openai/{MODEL}", "messages": QUESTION, "max_tokens": 1, **to_openai, **changes}
        return litellm.completion(**asked)

    with pytest.raises(litellm.ContextWindowExceededError):
        ask(messages=[{"role": "user", "content": "too long " * 3000}])
    with pytest.raises(litellm.NotFoundError):
        ask(model="openai/nobody")
    with pytest.raises(litellm.AuthenticationError):
        ask(api_key="hr-wrong")
    with pytest.raises(litellm.BadRequestError):
        ask(top_p=7)
    with pytest.raises(litellm.RateLimitError):
        _ = [ask(api_key=real_stack.key_of(HASTY)) for _ in range(2)]


def test_a_request_that_times_out_ends_on_the_engine_too(litellm, to_openai, given_up_early):
    asked = {"model": f"openai/{MODEL}", "messages": QUESTION, "max_tokens": LONG, "ignore_eos": True}
    with given_up_early(), pytest.raises(litellm.Timeout):
        litellm.completion(**asked, timeout=0.5, **to_openai)


def test_its_router_goes_on_to_a_model_that_has_an_engine(litellm, to_openai):
    def entry(name: str, model: str) -> dict[str, Any]:
        return {"model_name": name, "litellm_params": {"model": f"openai/{model}", **to_openai}}

    router = litellm.Router(
        [entry("first", ABSENT), entry("second", MODEL)], fallbacks=[{"first": ["second"]}], num_retries=0
    )
    answer = router.completion("first", QUESTION, max_tokens=32, temperature=0)
    assert "Paris" in answer.choices[0].message.content


@pytest.mark.parametrize("server", ["openai", "anthropic"])
def test_a_tool_is_called_streamed_and_whole(litellm, to_openai, to_anthropic, server):
    tool = {"name": "describe_city", "parameters": City.model_json_schema(), "strict": True}
    asked = {"model": f"{server}/{MODEL}", "messages": QUESTION, "max_tokens": 200, "temperature": 0}
    asked |= {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    asked |= to_anthropic if server == "anthropic" else to_openai
    whole = litellm.completion(**asked)
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    for answer in (whole, built):
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "describe_city"
        City.model_validate_json(call.function.arguments)
