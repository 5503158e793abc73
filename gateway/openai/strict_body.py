"""What the bodies of all endpoints are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

Label = Annotated[str, StringConstraints(max_length=512)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FieldError(ValueError):
    """A check of several fields says which of them is to be changed: `param`, seen from where it looks."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
