"""What clients think of single answers, in the figures of the experiments that the answers belong to."""

from __future__ import annotations

import asyncio
import logging
import re
from importlib import resources
from typing import Any

import msgspec
import redis.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import unavailable
from gateway.experiment_figures import FLUSH_INTERVAL_S, ExperimentFigures
from shared.experiment_figures import (
    FEEDBACK_UNITS,
    MAX_COMMENTS,
    AnswerRecord,
    CommentRecord,
    feedback_fields,
)
from shared.identifiers import TenantId
from shared.redis_schema import ANSWER_LIFETIME_S, EXPERIMENT_LIFETIME_S, RedisKeys

logger = logging.getLogger(__name__)

# Any other is not looked for, nor waited for: see AnswerIdentity and gateway/openai/responses/identity.py.
_ANSWER_ID = re.compile(r"[a-z]{1,16}[-_][0-9a-f]{24}")


class FeedbackStore:
    def __init__(
        self, client: redis.asyncio.Redis, keys: RedisKeys, breaker: RedisBreaker, figures: ExperimentFigures
    ) -> None:
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._figures = figures
        self._script: Any = client.register_script(
            resources.files("gateway").joinpath("feedback.lua").read_text()
        )

    async def add(self, tenant: TenantId, response_id: str, score: float, comment: str) -> bool:
        """Whether there is such an answer. Its later score takes the place of the earlier one.

        Raises ApiError 503.
        """
        try:
            answer = await self._answer(tenant, response_id)
            if answer is None:
                return False
            await self._breaker.call(lambda: self._write(tenant, response_id, answer, score, comment))
        except RedisUnavailableError as error:
            raise unavailable("Feedback cannot be stored at the moment.", 1.0) from error
        return True

    async def _answer(self, tenant: TenantId, response_id: str) -> AnswerRecord | None:
        if not _ANSWER_ID.fullmatch(response_id):
            return None
        pending = self._figures.pending_answer(tenant, response_id)
        if pending is not None:
            return pending
        key = self._keys.answer(tenant, response_id)
        stored = await self._breaker.call(lambda: self._client.get(key))
        if stored is None:  # perhaps of another gateway, which has not written it yet
            await asyncio.sleep(1.2 * FLUSH_INTERVAL_S)
            stored = await self._breaker.call(lambda: self._client.get(key))
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored, type=AnswerRecord)
        except msgspec.DecodeError as error:  # of another version of Headrace, perhaps
            logger.error("the answer %s is known, but cannot be read: %s", response_id, error)
            return None

    async def _write(
        self, tenant: TenantId, response_id: str, answer: AnswerRecord, score: float, comment: str
    ) -> None:
        keys, experiment = self._keys, (answer.route, answer.experiment_version)
        text = msgspec.json.encode(CommentRecord(answer.variant, score, comment)) if comment else b""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(keys.experiment_tenants(*experiment), tenant)
            pipe.expire(keys.experiment_tenants(*experiment), EXPERIMENT_LIFETIME_S)
            await pipe.execute()
        await self._script(
            keys=[
                keys.feedback(tenant, response_id),
                keys.experiment_feedback(tenant, *experiment),
                keys.experiment_comments(tenant, *experiment),
            ],
            args=[
                round(score * FEEDBACK_UNITS),
                *feedback_fields(answer.variant, answer.cluster),
                response_id,
                text,
                ANSWER_LIFETIME_S,
                EXPERIMENT_LIFETIME_S,
                MAX_COMMENTS,
            ],
        )
