"""Chat templates: Jinja as models ship it, in a sandbox, since a template is somebody else's program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest


class ChatTemplate:
    """A compiled template. Rendering is pure: the same messages give the same text.

    The functions offered to a template (`raise_exception`, `strftime_now`, a `tojson` that keeps
    non-ASCII text) are those that transformers offers, since templates are written against it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation. Raises InvalidRequest when the template refuses it."""
        try:
            return self._template.render(
                **self._special_tokens,
                **variables,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:  # TypeError: e.g. text + None inside a template
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
