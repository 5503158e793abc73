"""Where the engine link leaves what comes for one request, for its handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from shared.identifiers import RequestId
from shared.messages import Beam, Embedded, FinishReason, SequenceUpdate, TokenLogprobs


class PendingUpdate:
    """All that has come for one sequence since the handler last looked."""

    __slots__ = (
        "beams",
        "finish_reason",
        "logprobs",
        "new_token_ids",
        "num_cached_tokens",
        "prompt_logprobs",
        "stop_token_id",
    )

    def __init__(self) -> None:
        self.new_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # parallel to the tokens, or empty
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.beams: list[Beam] = []
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None

    @classmethod
    def of_beam(cls, beam: Beam) -> PendingUpdate:
        """As if it had been a sequence of its own."""
        update = cls()
        update.new_token_ids = beam.token_ids
        update.finish_reason = beam.finish_reason
        update.stop_token_id = beam.stop_token_id
        return update


class MailboxOverflowError(Exception):
    """An engine sent more tokens than were asked for."""


class Mailbox:
    """Updates of one request's sequences, merged per sequence while the handler is busy.

    Writing never waits, so one slow client cannot hold up the link that all requests share. The
    bound is the number of tokens a sequence may have: an engine that exceeds it breaks the protocol
    and the request fails. One reader.
    """

    def __init__(self, max_tokens: Mapping[RequestId, int]) -> None:
        self._tokens_left = dict(max_tokens)
        self._pending: dict[RequestId, PendingUpdate] = {}
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self.first_put_at: float | None = None  # as of time.monotonic

    def put(self, update: SequenceUpdate) -> None:
        longest_beam = max((len(beam.token_ids) for beam in update.beams), default=0)
        left = self._tokens_left[update.request_id] - len(update.new_token_ids) - longest_beam
        self._tokens_left[update.request_id] = left
        if left < 0:
            self.fail(MailboxOverflowError("the engine sent more tokens than were asked for"))
            return
        pending = self._pending.get(update.request_id)
        if pending is None:
            pending = self._pending[update.request_id] = PendingUpdate()
            if self.first_put_at is None:
                self.first_put_at = time.monotonic()
        pending.new_token_ids += update.new_token_ids
        pending.logprobs += update.logprobs
        pending.prompt_logprobs += update.prompt_logprobs
        pending.beams += update.beams
        pending.num_cached_tokens = update.num_cached_tokens or pending.num_cached_tokens
        pending.finish_reason = update.finish_reason
        pending.stop_token_id = update.stop_token_id
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the request; updates that came before are still delivered first."""
        if self._failure is None:
            self._failure = error
            self._changed.set()

    async def take(self) -> dict[RequestId, PendingUpdate]:
        """Everything that is there, at least one update. Raises what `fail` was called with."""
        await self._changed.wait()
        self._changed.clear()
        pending, self._pending = self._pending, {}
        if self._failure is not None:
            self._changed.set()  # for the next call, which raises
            if not pending:
                raise self._failure
        return pending


class VectorMailbox:
    """Where the engine link leaves the answer to one Embed, which comes whole. One reader."""

    def __init__(self) -> None:
        self._answer: Embedded | Exception | None = None
        self._has_come = asyncio.Event()

    def put(self, embedded: Embedded) -> None:
        self._settle(embedded)

    def fail(self, error: Exception) -> None:
        self._settle(error)

    async def take(self) -> Embedded:
        """Raises what `fail` was called with, if that came first."""
        await self._has_come.wait()
        assert self._answer is not None, "what has come is there"
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _settle(self, answer: Embedded | Exception) -> None:
        if self._answer is None:
            self._answer = answer
            self._has_come.set()
