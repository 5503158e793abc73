"""`/v1/responses` with the default model: typed answers, a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from compose.temporary_stack import temporary_stack

MODEL = "smollm2-135m"


class City(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with temporary_stack() as stack:
        yield openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.demo_key, max_retries=0, timeout=120)


def test_a_pydantic_model_is_parsed_whole_and_streamed(client):
    options = {"model": MODEL, "input": "Describe Paris as JSON.", "text_format": City, "temperature": 0}
    whole = client.responses.parse(**options, max_output_tokens=100)
    assert isinstance(whole.output_parsed, City)
    with client.responses.stream(**options, max_output_tokens=100) as stream:
        streamed = stream.until_done().get_final_response()
    assert streamed.output_parsed == whole.output_parsed


def test_a_second_turn_reads_the_cache_of_the_first(client):
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": 48}
    first = client.responses.create(**options, input="Tell me a story about a mill at a river.")
    second = client.responses.create(**options, input="Go on.", previous_response_id=first.id)
    num_known = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= num_known - 2
