"""One request to be made, or several of which each waits for the answer to the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]


class Prompt(msgspec.Struct, frozen=True, tag=True):
    """One request. Token ids only for backends that take them."""

    content: str | list[int]
    num_output_tokens: int
    tenant: str = ""  # as --tenants names it, or a trace
    model: str | None = None  # None: that of the target
    headers: tuple[tuple[str, str], ...] = ()  # beside those of the target, before which they go
    history: tuple[tuple[Role, str], ...] = ()  # of a conversation, before `content`
    conversation: int | None = None  # its index, for turns of one
    turn: int = 0

    @property
    def num_tokens(self) -> int | None:
        """Length in the server's own tokens; None for text, which only the server can count."""
        return len(self.content) if isinstance(self.content, list) and not self.history else None


class Turn(msgspec.Struct, frozen=True):
    content: str
    num_output_tokens: int
    think_time_s: float = 0.0  # between the end of the answer before and this


class Conversation(msgspec.Struct, frozen=True, tag=True):
    """Turns of one user: each is due when the answer before has ended, plus the time for thinking.

    A turn carries the whole history, with the answers that the server really gave.
    """

    turns: tuple[Turn, ...]
    system: str = ""
    tenant: str = ""
    model: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def prompt(self, turn: int, history: tuple[tuple[Role, str], ...], index: int) -> Prompt:
        """The request of a turn. `history`: what `extended` has collected, the system prompt left out."""
        opening: tuple[tuple[Role, str], ...] = (("system", self.system),) if self.system else ()
        return Prompt(
            self.turns[turn].content,
            self.turns[turn].num_output_tokens,
            tenant=self.tenant,
            model=self.model,
            headers=self.headers,
            history=opening + history,
            conversation=index,
            turn=turn,
        )

    def extended(
        self, history: tuple[tuple[Role, str], ...], turn: int, answer: str
    ) -> tuple[tuple[Role, str], ...]:
        return (*history, ("user", self.turns[turn].content), ("assistant", answer))


Item = Prompt | Conversation


def num_first_words(item: Item) -> int | None:
    """Of the first request; None where it is token ids."""
    if isinstance(item, Conversation):
        return len(item.system.split()) + len(item.turns[0].content.split())
    return len(item.content.split()) if isinstance(item.content, str) else None


def num_distinct_requests(items: Sequence[Item]) -> int:
    """Requests with the same text and the same turns before it are one. Answers, which no one knows
    beforehand, are left out."""
    known: dict[tuple[int, object], int] = {}
    for item in items:
        if isinstance(item, Prompt):
            content = item.content if isinstance(item.content, str) else tuple(item.content)
            known.setdefault((-1, content), len(known))
            continue
        before = -1
        for number, turn in enumerate(item.turns):
            content = turn.content if number else (item.system, turn.content)
            before = known.setdefault((before, content), len(known))
    return len(known)


def num_requests(items: list[Item]) -> int:
    """How many there are if nothing fails: a failed turn ends its conversation."""
    return sum(len(item.turns) if isinstance(item, Conversation) else 1 for item in items)
