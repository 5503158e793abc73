"""Chat templates: Jinja as models ship it, in a sandbox, since a template is somebody else's program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest

# Marks where the message to be continued ends; rendered, and cut off together with what comes behind it.
_END_OF_MESSAGE = "\ue000end of the final message\ue000"


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
        self.source = source
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)
        # As one dict: jinja2 copies its chain of mappings name by name at each rendering.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. `tools` have OpenAI's form; a template that does not know them leaves
        them out. `continue_final_message`: it ends with the text of the last message, which has some.
        `variables` never replace what the template is told by us.

        Raises InvalidRequest when the template refuses it.
        """
        if continue_final_message:
            *earlier, last = messages
            messages = [*earlier, {**last, "content": f"{last['content']}{_END_OF_MESSAGE}"}]
        # As one mapping: names that a client chose may be those of parameters, such as `self`.
        context = {
            **(variables or {}),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = self._template.render(context)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # Whatever a template's own operations raise on messages that it was not written for.
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error
        if not continue_final_message:
            return prompt
        prompt, found, _ = prompt.rpartition(_END_OF_MESSAGE)
        if not found:
            raise InvalidRequest(
                "the model's chat template leaves out or changes the last message, so it cannot be continued",
                "continue_final_message",
            )
        return prompt


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
