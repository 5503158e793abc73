"""Reads what a chat model writes: thoughts, text and calls of tools, each in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway.openai.reasoning import ReasoningSplitter
from gateway.openai.tools.call_parser import CallArguments, CallBegin, CallParser, Part
from gateway.text_delta import TextDelta, ToolCallDelta


class ChatTurnReader:
    """Implements TurnReader."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        parser: CallParser | None,
        *,
        fresh_call_id: Callable[[], str],
        tells_reasoning: bool = True,
        max_calls: int | None = None,
        must_call: bool = False,
    ) -> None:
        """`max_calls`: further ones are left out; None: there is no bound. `must_call`: what is no call is
        the begin of one that was cut off, and no text."""
        self._splitter = splitter
        self._parser = parser
        self._fresh_call_id = fresh_call_id
        self._tells_reasoning = tells_reasoning
        self._max_calls = max_calls
        self._must_call = must_call
        self._num_calls = 0

    def read(self, delta: TextDelta) -> Sequence[TextDelta]:
        reasoning, parts = self._take_apart(delta)
        if not reasoning and (not parts or parts == [delta.text]):
            return [delta if parts or not delta.text else replace(delta, text="")]
        pieces = self._pieces(reasoning, parts)
        last = len(pieces) - 1
        return [
            # What is told of tokens comes with the first piece, how it ended with the last one.
            replace(
                delta if number == 0 else TextDelta(delta.index, "", None),
                text=piece.text,
                reasoning=piece.reasoning,
                tool_calls=tuple(piece.calls),
                finish_reason=delta.finish_reason if number == last else None,
                stop_reason=delta.stop_reason if number == last else None,
            )
            for number, piece in enumerate(pieces)
        ]

    def _take_apart(self, delta: TextDelta) -> tuple[str, list[Part]]:
        has_ended = delta.finish_reason is not None
        reasoning, answer = "", delta.text
        if self._splitter is not None:
            reasoning, answer = self._splitter.feed(delta.text)
            if has_ended:
                thought, said = self._splitter.finish()
                reasoning, answer = reasoning + thought, answer + said
        if not self._tells_reasoning:
            reasoning = ""
        if self._parser is None:
            return reasoning, [answer] if answer else []
        parts = self._parser.feed(answer) if answer else []
        if has_ended:
            parts = [*parts, *self._parser.finish()]
        if self._must_call:
            parts = [part for part in parts if not isinstance(part, str)]
        return reasoning, parts

    def _pieces(self, reasoning: str, parts: Sequence[Part]) -> list[_Piece]:
        """In the order in which they were written: a piece has its text before its calls."""
        pieces = [_Piece(reasoning)]
        for part in parts:
            if isinstance(part, str):
                if pieces[-1].calls:
                    pieces.append(_Piece())
                pieces[-1].text += part
            elif isinstance(part, CallBegin):
                self._num_calls += 1
                if not self._is_left_out:
                    call_id = self._fresh_call_id()
                    begin = ToolCallDelta(self._num_calls - 1, call_id=call_id, name=part.name)
                    pieces[-1].calls.append(begin)
            elif not self._is_left_out:
                pieces[-1].add_arguments(self._num_calls - 1, part)
        return pieces

    @property
    def _is_left_out(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls


@dataclass(slots=True)
class _Piece:
    reasoning: str = ""
    text: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add_arguments(self, index: int, more: CallArguments) -> None:
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(ToolCallDelta(index))
        last = self.calls[-1]
        self.calls[-1] = replace(last, arguments=last.arguments + more.text)
