"""Bodies of /v1/embeddings: every form of an input, and the name of what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.openai.embeddings_body import MAX_INPUTS, EmbeddingsBody
from gateway.openai.schema import check_body


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", **fields}


@pytest.mark.parametrize(
    ("given", "inputs", "params"),
    [
        ("hi", ["hi"], ["input"]),
        (["a", "b"], ["a", "b"], ["input[0]", "input[1]"]),
        ([1, 2], [[1, 2]], ["input"]),
        ([[1, 2], [3]], [[1, 2], [3]], ["input[0]", "input[1]"]),
        (["x"] * MAX_INPUTS, ["x"] * MAX_INPUTS, ["input[0]"]),
    ],
)
def test_an_input_may_have_four_forms(given: Any, inputs: list[Any], params: list[str]) -> None:
    checked = check_body(EmbeddingsBody, body(input=given))
    assert checked.inputs == inputs
    assert [checked.param_of(index) for index in range(len(params))] == params


def test_null_means_the_default() -> None:
    checked = check_body(EmbeddingsBody, body(encoding_format=None, dimensions=None, user=None))
    assert (checked.encoding_format, checked.dimensions, checked.user) == (None, None, None)


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"input": "hi"}, "model"),
        ({"model": "m"}, "input"),
        (body(input=""), "input"),
        (body(input=None), "input"),
        (body(input=7), "input"),
        (body(input={}), "input"),
        (body(input=[]), "input"),
        (body(input=[""]), "input[0]"),
        (body(input=["a", ""]), "input[1]"),
        (body(input=["a", 1]), "input[1]"),
        (body(input=["a", ["b"]]), "input[1]"),
        (body(input=[[]]), "input[0]"),
        (body(input=[[1], []]), "input[1]"),
        (body(input=[[1], "a"]), "input[1]"),
        (body(input=[[1], [-1]]), "input[1][0]"),
        (body(input=[[1, 2**31]]), "input[0][1]"),
        (body(input=[1, -1]), "input[1]"),
        (body(input=[1, "a"]), "input[1]"),
        (body(input=[1.5]), "input[0]"),
        (body(input=[True]), "input[0]"),
        (body(input=["x"] * (MAX_INPUTS + 1)), "input"),
        (body(input=[[1]] * (MAX_INPUTS + 1)), "input"),
        (body(encoding_format="hex"), "encoding_format"),
        (body(dimensions=0), "dimensions"),
        (body(dimensions="8"), "dimensions"),
        (body(dimensions=2**40), "dimensions"),
        (body(user=5), "user"),
        (body(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
        (body(stream=True), "stream"),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_body(EmbeddingsBody, document)
    assert (caught.value.status, caught.value.param) == (400, param)
