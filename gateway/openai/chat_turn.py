"""How a chat model's turn is planned: the form that it is held to, and who reads its text."""

from __future__ import annotations

import json
from collections.abc import Callable

from gateway.errors import invalid_request
from gateway.generation import Prompt
from gateway.openai import reasoning
from gateway.openai.chat_reader import ChatTurnReader
from gateway.openai.conversation import Conversation
from gateway.openai.reasoning import ReasoningSplitter
from gateway.openai.schema import ChatCompletionBody
from gateway.openai.tools import call_grammar
from gateway.openai.tools.call_grammar import MAX_CALLS, Speller, Thoughts
from gateway.openai.tools.tool_format import ToolFormat, tool_format
from gateway.openai.turn import Speaker, TurnPlan
from shared.sampling import StructuredOutput


def plan_chat_turn(body: ChatCompletionBody, speaker: Speaker, prompt: Prompt) -> TurnPlan:
    """Raises ApiError 400 for what this model does not do."""
    conversation = body.conversation
    planner = _TurnPlanner(conversation, speaker, prompt)
    form, form_param = planner.form(body)
    tools = planner.tools
    # A form of another kind leaves no room for thoughts.
    splits = planner.markers is not None and (form is None or form.kind == "schemas")
    if not tools and not splits:
        return TurnPlan(form, form_param, body.skip_special_tokens)
    return TurnPlan(
        form,
        form_param,
        body.skip_special_tokens,
        planner.kept_special_tokens,
        lambda: planner.make_reader(splits=splits),
    )


class _TurnPlanner:
    def __init__(self, conversation: Conversation, speaker: Speaker, prompt: Prompt) -> None:
        self._conversation = conversation
        self._tokenizer = speaker.tokenizer
        self._speller = Speller(speaker.tokenizer)
        self.tools = conversation.callable_tools
        config, template = speaker.config, speaker.tokenizer.chat_template
        self._format: ToolFormat | None = None
        if self.tools:
            self._format = tool_format(config.tool_call_parser if config else None, template)
            if self._format is None:
                raise invalid_request(
                    "This model writes no calls of tools in a form that is known here; if it does, its "
                    "configuration can name the form as tool_call_parser.",
                    "tools",
                    "unsupported_parameter",
                )
        self.markers = reasoning.reasoning_markers(
            config.reasoning_parser if config else None, template.source
        )
        self._are_thoughts_open = self.markers is not None and self.markers.are_opened_by(
            self._tokenizer.decode(prompt.token_ids[-reasoning.TAIL_TOKENS :], skip_special_tokens=False)
        )

    def form(self, body: ChatCompletionBody) -> tuple[StructuredOutput | None, str | None]:
        """With the field that is to be named where it cannot be kept; None: that of structured output."""
        if self._format is None and self.markers is None:
            return body.form, None
        conversation, answer = self._conversation, _json_answer(body.form)
        thoughts = None
        if self.markers is not None:
            thoughts = Thoughts(self.markers, self._speller, self._are_thoughts_open)
        if self._format is None:
            if answer is None or thoughts is None:
                return body.form, None
            return call_grammar.answer_alone(answer, thoughts), None
        tools = [tool for tool in self.tools if conversation.only_tool in (None, tool.name)]
        max_calls = MAX_CALLS if conversation.parallel_tool_calls and conversation.only_tool is None else 1
        rules = self._format.calls(self._speller, tools, max_calls)
        if conversation.tool_choice == "required":
            return call_grammar.forced(rules, thoughts), "tools"
        if answer is not None:
            return call_grammar.forced_or_answer(rules, answer, thoughts), "tools"
        if body.form is not None:
            return body.form, None
        return (call_grammar.free(rules), "tools") if any(tool.is_strict for tool in tools) else (None, None)

    @property
    def kept_special_tokens(self) -> frozenset[int]:
        """Those by which a reader tells the parts apart."""
        markers: list[str] = []
        if self._format is not None:
            markers += self._format.markers
        if self.markers is not None:
            markers += [self.markers.begin, self.markers.end]
        token_ids = [self._tokenizer.added_token(marker) for marker in markers]
        return frozenset(
            token_id
            for token_id in token_ids
            if token_id is not None and self._tokenizer.is_special(token_id)
        )

    def make_reader(self, *, splits: bool) -> ChatTurnReader:
        splitter = parser = None
        fresh_call_id: Callable[[], str] = str  # of nothing
        if self.markers is not None and splits:
            splitter = ReasoningSplitter(self.markers, is_open=self._are_thoughts_open)
        if self._format is not None:
            parser = self._format.make_parser(frozenset(tool.name for tool in self.tools))
            fresh_call_id = self._format.fresh_call_id
        return ChatTurnReader(
            splitter,
            parser,
            fresh_call_id=fresh_call_id,
            tells_reasoning=self._conversation.tells_reasoning,
            must_call=self._conversation.tool_choice == "required",
            max_calls=None if self._conversation.parallel_tool_calls else 1,
        )


def _json_answer(form: StructuredOutput | None) -> str | None:
    """The Lark of an answer in JSON; None: there is no form, one of another kind, or one that is no JSON,
    which an engine refuses in better words."""
    if form is not None and form.kind == "json_object":
        return call_grammar.json_of({"type": "object"}, is_strict=True)
    if form is None or form.kind != "json_schema":
        return None
    try:
        return call_grammar.json_of(json.loads(form.text), is_strict=form.is_strict)
    except (ValueError, RecursionError):
        return None
