"""The responses that this gateway makes while nobody waits for them, and their leases (see store.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gateway.errors import ApiError
from gateway.openai.responses.store import ResponseStore
from shared.identifiers import TenantId
from shared.redis_schema import RESPONSE_LEASE_REFRESH_INTERVAL_S, ResponseRecord

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5  # to store how one ended; the lease outlives them
ATTEMPT_INTERVAL_S = 1.0


class BackgroundResponses:
    """Each is made by a task of its own, which calls `begin`, and `end` for whatever end it comes to by
    itself. A response that was cancelled or deleted, here or at another gateway, has lost its lease, and its
    task is cancelled: at once here, within a second elsewhere."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: dict[tuple[TenantId, str], asyncio.Task[object]] = {}

    async def begin(self, tenant: TenantId, record: ResponseRecord) -> None:
        """Stores a response that waits to be made by the current task. Raises ApiError if it cannot be."""
        await self._store.begin(tenant, record)
        task = asyncio.current_task()
        assert task is not None, "a response is made by a task"
        its_key = tenant, record.response["id"]
        self._tasks[its_key] = task
        task.add_done_callback(lambda _: self._tasks.pop(its_key))

    async def note_progress(self, tenant: TenantId, response_id: str) -> None:
        """It is being made."""
        await self._store.note_progress(tenant, response_id)

    async def end(self, tenant: TenantId, record: ResponseRecord) -> None:
        """Stores how it ended, unless it was cancelled or deleted meanwhile. Raises ApiError if Redis does
        not take it even after some attempts, or never will."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._store.end(tenant, record)
            except ApiError as error:
                if error.retry_after_s is None or attempt == MAX_ATTEMPTS:
                    raise
                logger.warning("how %s ended is not stored yet: %s", record.response["id"], error)
                await asyncio.sleep(ATTEMPT_INTERVAL_S)
            else:
                return

    def cancel(self, tenant: TenantId, response_id: str) -> None:
        """Ends the task of a response that has lost its lease, if it is one of ours."""
        if (task := self._tasks.get((tenant, response_id))) is not None:
            task.cancel()

    async def keep_leases(self) -> None:
        """Extends them for ever, and finds those that were taken away."""
        while True:
            await asyncio.sleep(RESPONSE_LEASE_REFRESH_INTERVAL_S)
            ours = list(self._tasks)
            if not ours:
                continue
            with contextlib.suppress(ApiError):  # Redis is away, which was logged: the next round tries again
                for response, has_lease in zip(ours, await self._store.extend_leases(ours), strict=True):
                    if not has_lease:
                        self.cancel(*response)
