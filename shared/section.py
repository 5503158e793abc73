"""What every table of headrace.toml is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}$")]
NameOrAll = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127})$")]


class Section(BaseModel):
    """A table of the file. Unknown keys are refused, and values of another type: "off" is no boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
