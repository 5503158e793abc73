"""Tells those who keep figures of every request that has ended, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gateway.request_account import RequestAccount
from shared.usage import UsageRecord

logger = logging.getLogger(__name__)

# Must not wait: what a keeper sends to somewhere, it collects and sends later.
Keeper = Callable[[UsageRecord], None]


class Ledger:
    def __init__(self, keepers: Sequence[Keeper] = ()) -> None:
        self._keepers = tuple(keepers)

    def close(self, account: RequestAccount, status: int, error_code: str | None) -> None:
        """`status`: of the HTTP answer, or 499 if the client left. Idempotent."""
        if account.is_closed:
            return
        account.is_closed = True
        record = account.record(status, error_code)
        for keeper in self._keepers:
            try:
                keeper(record)
            except Exception:  # a fault in the figures must not become one of the answer
                logger.exception("the request %s is missing in some figures", account.request_id)
