"""Chat templates: Jinja as models ship it, in a sandbox, since a template is somebody else's program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest


class ChatTemplate:
    """A compiled template, with what transformers offers to one, since templates are written against it:
    `raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII text, and the `generation` tag.

    Raises jinja2.TemplateSyntaxError for a template that does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. `variables` never replace what the template is told by us.

        Raises InvalidRequest when the template refuses it.
        """
        # As one mapping: names that a client chose may be those of parameters, such as `self`.
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # Whatever a template's own operations raise on messages that it was not written for.
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the form that jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
