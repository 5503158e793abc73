"""Fields of a body that nothing here knows: taken out and named, where the configuration wants no refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from gateway.openai.schema import AnyBody, check_body

MAX_NAMED = 32
_MAX_NAME_CHARACTERS = 64


def check_without_unknown(kind: type[AnyBody], document: object) -> tuple[AnyBody, tuple[str, ...]]:
    """The body, and the paths of what was taken out of the document, such as `messages[0].weight`.

    Raises ApiError 400 that names the first field that is wrong in another way.
    """
    ignored: list[str] = []
    while True:
        unknown = _unknown(kind, document)
        if not unknown:
            return check_body(kind, document), tuple(dict.fromkeys(ignored))
        ignored += [_take_out(document, path) for path in unknown]


def header_value(ignored: Sequence[str]) -> str:
    """Of `x-headrace-ignored`: what a client sent as a name must not become a header of its own."""
    names = [
        name[:_MAX_NAME_CHARACTERS].encode("ascii", "backslashreplace").decode().replace(",", "%2C")
        for name in ignored[:MAX_NAMED]
    ]
    more = [f"and {len(ignored) - MAX_NAMED} more"] if len(ignored) > MAX_NAMED else []
    return ", ".join("".join(filter(str.isprintable, name)) for name in [*names, *more])


def _unknown(kind: type[AnyBody], document: object) -> list[list[str | int]]:
    """Paths to fields that were refused only because nothing knows them, in the document itself."""
    if not isinstance(document, dict):
        return []
    try:
        kind.model_validate(document)
    except ValidationError as error:
        paths = [
            _path_in(document, each["loc"])
            for each in error.errors(include_url=False, include_input=False, include_context=False)
            if each["type"] == "extra_forbidden"
        ]
        distinct = {tuple(path): path for path in paths if path}
        return list(distinct.values())
    return []


def _path_in(document: Any, location: tuple[str | int, ...]) -> list[str | int]:
    """The location without the parts that name one form of several; empty if it leads nowhere."""
    path: list[str | int] = []
    value = document
    for index, part in enumerate(location):
        is_field = isinstance(value, dict) and part in value
        is_entry = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_field or is_entry:
            value = value[part]
        elif index == len(location) - 1:
            return []
        else:
            continue
        path.append(part)
    return path


def _take_out(document: Any, path: list[str | int]) -> str:
    *parents, last = path
    for part in parents:
        document = document[part]
    document.pop(last, None)
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
