"""Tells those who keep figures of every request that has ended, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVarTuple

from gateway.request_account import RequestAccount
from gateway.routing.draw import Draw
from shared.usage import UsageRecord

logger = logging.getLogger(__name__)

# Must not wait: what a keeper sends to somewhere, it collects and sends later.
Keeper = Callable[[UsageRecord], None]
ExperimentKeeper = Callable[[UsageRecord, Draw], None]

ToldT = TypeVarTuple("ToldT")


class Ledger:
    def __init__(
        self, keepers: Sequence[Keeper] = (), experiment_keepers: Sequence[ExperimentKeeper] = ()
    ) -> None:
        """`experiment_keepers`: are told of requests that count for an experiment only."""
        self._keepers = tuple(keepers)
        self._experiment_keepers = tuple(experiment_keepers)

    def close(self, account: RequestAccount, status: int, error_code: str | None) -> None:
        """`status`: of the HTTP answer, or 499 if the client left. Idempotent."""
        if account.is_closed:
            return
        account.is_closed = True
        record = account.record(status, error_code)
        for keeper in self._keepers:
            _tell(account, keeper, record)
        if account.draw is not None:
            for experiment_keeper in self._experiment_keepers:
                _tell(account, experiment_keeper, record, account.draw)


def _tell(account: RequestAccount, keeper: Callable[[*ToldT], None], *told: *ToldT) -> None:
    try:
        keeper(*told)
    except Exception:  # a fault in the figures must not become one of the answer
        logger.exception("the request %s is missing in some figures", account.request_id)
