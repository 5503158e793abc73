"""langchain-openai, unchanged, against the default model."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.conftest import LONG
from tests.real_stack import EMBEDDER, MODEL, RealStack

QUESTION = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool


@pytest.fixture(scope="module")
def langchain_openai() -> Any:
    """Imported by whoever uses it: it takes two seconds."""
    import langchain_openai

    return langchain_openai


@pytest.fixture(scope="module")
def options(real_stack: RealStack) -> dict[str, Any]:
    return {"base_url": real_stack.url + "/v1", "api_key": real_stack.key, "temperature": 0, "max_retries": 0}


@pytest.fixture(scope="module", params=["chat", "responses"])
def chat(langchain_openai: Any, options: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Over either of OpenAI's interfaces."""
    uses_responses = request.param == "responses"
    return langchain_openai.ChatOpenAI(
        model=MODEL, max_tokens=64, use_responses_api=uses_responses, stream_usage=True, **options
    )


def test_a_question_is_answered_streamed_and_whole(chat):
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    total = sum(chunks[1:], start=chunks[0])
    assert "Paris" in whole.text
    assert total.text == whole.text
    assert len(chunks) > 3
    for name in ("input_tokens", "output_tokens"):
        assert total.usage_metadata[name] == whole.usage_metadata[name]


@pytest.mark.asyncio(loop_scope="module")  # it keeps its connections
async def test_it_asks_asynchronously(chat):
    whole = await chat.ainvoke(QUESTION)
    streamed = "".join([chunk.text async for chunk in chat.astream(QUESTION)])
    assert streamed == whole.text


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of its own handling of what it parsed
def test_structured_output_is_an_object_of_its_type(chat):
    cities = chat.with_structured_output(City)
    assert isinstance(cities.invoke("Describe Paris."), City)
    *_, last = cities.stream("Describe Paris.")
    assert isinstance(last, City)


@pytest.mark.parametrize(
    "asked", [{"reasoning_effort": "low", "verbosity": "medium"}, {"reasoning": {"effort": "low"}}]
)
def test_an_effort_may_be_asked_for_over_either_interface(langchain_openai, options, asked):
    assert langchain_openai.ChatOpenAI(model=MODEL, max_tokens=16, **asked, **options).invoke(QUESTION).text


def test_a_conversation_goes_on_from_a_stored_response(langchain_openai, options):
    chat = langchain_openai.ChatOpenAI(
        model=MODEL, max_tokens=32, use_responses_api=True, use_previous_response_id=True, **options
    )
    first = chat.invoke(QUESTION)
    second = chat.invoke([("user", QUESTION), first, ("user", "Go on.")])
    known = first.usage_metadata["input_tokens"] + first.usage_metadata["output_tokens"]
    assert second.usage_metadata["input_token_details"]["cache_read"] >= known - 2


def test_plain_completions_and_batches_are_served(langchain_openai, options):
    writer = langchain_openai.OpenAI(model=MODEL, max_tokens=8, **options)
    one, two = writer.batch(["One, two,", "Red, green,"])
    assert "".join(writer.stream("One, two,")) == one
    assert two != one


def test_log_probabilities_come_beside_the_text(langchain_openai, options):
    chat = langchain_openai.ChatOpenAI(model=MODEL, max_tokens=4, logprobs=True, top_logprobs=2, **options)
    answer = chat.invoke(QUESTION)
    told = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in told) == answer.text


@pytest.mark.asyncio(loop_scope="module")
async def test_embeddings_are_those_of_the_texts(langchain_openai, options):
    """With `check_embedding_ctx_length` it would send tokens of OpenAI's models."""
    given = {name: options[name] for name in ("base_url", "api_key")}
    embeddings = langchain_openai.OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=False, **given)
    documents = embeddings.embed_documents(["water falls", "fox"])
    assert documents[1] == pytest.approx(await embeddings.aembed_query("fox"), abs=1e-5)
    assert documents[0] != pytest.approx(documents[1], abs=1e-2)


def test_a_request_that_times_out_ends_on_the_engine_too(langchain_openai, options, given_up_early):
    asked = {"model": MODEL, "max_tokens": LONG, "timeout": 0.5, "extra_body": {"ignore_eos": True}}
    chat = langchain_openai.ChatOpenAI(**asked, **options)
    with given_up_early(), pytest.raises(Exception, match="timed out"):
        chat.invoke(QUESTION)


def test_a_tool_is_called_and_its_result_is_read(chat):
    able = chat.bind_tools([City], tool_choice="any", strict=True, parallel_tool_calls=False)
    asked = able.invoke("Describe Paris.")
    chunks = list(able.stream("Describe Paris."))
    streamed = sum(chunks[1:], start=chunks[0])
    [call] = asked.tool_calls
    assert call["name"] == "City"
    City.model_validate(call["args"])
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 1
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is known."}
    told = chat.bind_tools([City], tool_choice="none").invoke([("user", "Describe Paris."), asked, result])
    assert told.text
    assert not told.tool_calls


def test_structured_output_by_a_call_is_an_object_of_its_type(chat):
    cities = chat.with_structured_output(City, method="function_calling")
    assert isinstance(cities.invoke("Describe Paris."), City)
