"""What parameters that a user writes in Python have in common: how they say no."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError


class UserParams(BaseModel):
    """Checked when it is made: ValueError names the wrong field, TypeError the unknown one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    if not TYPE_CHECKING:  # type checkers know the fields as keywords, and this would hide them

        def __init__(self, **values: Any) -> None:
            known = [info.alias or name for name, info in type(self).model_fields.items()]
            for name in values:
                if name not in known:
                    nearest = difflib.get_close_matches(name, known, n=1)
                    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                    raise TypeError(f"{type(self).__name__} has no field {name!r}{hint}")
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ValueError(_in_one_line(error)) from None


def _in_one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message  # of a check of the whole, which names the field itself
    if first["type"] in ("none_required", "literal_error"):
        message = f"{message}; nothing else is served yet"
    return f"{first['loc'][0]}: {message}, got {first['input']!r:.80}"
