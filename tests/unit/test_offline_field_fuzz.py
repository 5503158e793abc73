"""Every field of the parameters of the offline API, with values that it should not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_service import LLM, GenerationError, SamplingParams
from tests.odd_values import ODD_VALUES


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake:", max_num_seqs=4, max_model_len=64) as llm:
        yield llm


def refusal_of(llm: LLM, field: str, value: Any) -> str:
    """What is said of it when the parameters are made, or when they are used; nothing if they are served."""
    options: dict[str, Any] = {"max_tokens": 2, "seed": 1, field: value}
    try:
        params = SamplingParams(**options)
        [output] = llm.generate(["hi"], params, use_tqdm=False)
    except (ValueError, TypeError, GenerationError) as error:  # TypeError: of a field inside of this one
        return str(error)
    return "" if len(output.outputs) == params.n else f"{len(output.outputs)} choices came"


@pytest.mark.parametrize("field", [info.alias or name for name, info in SamplingParams.model_fields.items()])
def test_an_odd_value_is_refused_by_the_name_of_its_field_or_runs(llm: LLM, field: str) -> None:
    refusals = {label: refusal_of(llm, field, value) for label, value in ODD_VALUES.items()}
    named_by = (field, "StructuredOutputsParams has no field") if field == "structured_outputs" else (field,)
    for label, refusal in refusals.items():
        assert not refusal or any(name in refusal for name in named_by), f"{label}: {refusal}"
        assert len(refusal) < 1000, f"{label}: the whole value is told"
    [output] = llm.generate(["hi"], SamplingParams(max_tokens=2, seed=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
