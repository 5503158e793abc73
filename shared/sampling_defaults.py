"""How a variant chooses tokens where its client does not say, under the names that the API has for it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from shared.sampling import MIN_REPETITION_PENALTY
from shared.section import Section

INT32_MAX = 2**31 - 1
MAX_STOP_STRINGS = 16
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class SamplingDefaults(Section):
    """None: as the API has it. The bounds are those of the API, so that no default is refused later."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=10, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    # Of an answer whose client names no length; cut to what the context has room for.
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)

    @property
    def are_given(self) -> bool:
        return any(getattr(self, name) is not None for name in type(self).model_fields)
