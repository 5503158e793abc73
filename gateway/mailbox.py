"""Where the engine link leaves the updates of one request for its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shared.identifiers import RequestId
from shared.messages import FinishReason, SequenceUpdate, TokenLogprobs


class PendingUpdate:
    """All that has come for one sequence since the handler last looked."""

    __slots__ = ("finish_reason", "logprobs", "new_token_ids", "num_cached_tokens", "stop_token_id")

    def __init__(self) -> None:
        self.new_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # parallel to the tokens, or empty
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None


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

    def put(self, update: SequenceUpdate) -> None:
        left = self._tokens_left[update.request_id] - len(update.new_token_ids)
        self._tokens_left[update.request_id] = left
        if left < 0:
            self.fail(MailboxOverflowError("the engine sent more tokens than were asked for"))
            return
        pending = self._pending.get(update.request_id)
        if pending is None:
            pending = self._pending[update.request_id] = PendingUpdate()
        pending.new_token_ids += update.new_token_ids
        pending.logprobs += update.logprobs
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
