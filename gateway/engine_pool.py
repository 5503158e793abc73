"""The engines that this gateway can use: found in Redis, held as links."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import redis.asyncio
import zmq
import zmq.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.engine_link import EngineLink, LinkState
from shared.identifiers import EngineEpoch, EngineId, GatewayId
from shared.messages import EngineHello
from shared.redis_schema import ENGINE_RECORD_LIFETIME_S, EngineRecord, RedisKeys, from_json
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DISCOVERY_INTERVAL_S = 0.25
FORGET_LOSS_S = ENGINE_RECORD_LIFETIME_S + 1  # a record of a dead engine is gone by then


class TokenizerCache:
    """Tokenizers by the content hash of their text bundle: engines of one model share one."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}

    @property
    def hashes(self) -> list[str]:
        return list(self._tokenizers)

    async def load(self, hello: EngineHello) -> Tokenizer:
        known = self._tokenizers.get(hello.text_bundle_hash)
        if known is None:
            bundle = hello.text_bundle
            assert bundle is not None, "an engine leaves its bundle out only if we said that we hold it"
            # Building takes a tenth of a second and more: not on the event loop.
            known = await asyncio.to_thread(self._build, bundle)
            self._tokenizers[hello.text_bundle_hash] = known
        return known

    @staticmethod
    def _build(bundle: TextBundle) -> Tokenizer:
        return Tokenizer(bundle)


class EnginePool:
    """Follows the registry and owns the links. Redis being away changes nothing for links that work."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        breaker: RedisBreaker,
        gateway_id: GatewayId,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._gateway_id = gateway_id
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._tokenizers = TokenizerCache()
        self._links: dict[EngineId, EngineLink] = {}
        self._tasks: dict[EngineLink, asyncio.Task[None]] = {}
        self._lost_at: dict[EngineEpoch, float] = {}
        self._reported: dict[EngineId, str] = {}

    @property
    def links(self) -> list[EngineLink]:
        return list(self._links.values())

    def ready(self, model: str) -> list[EngineLink]:
        """Engines that take requests for a model, in an order that is the same at each call."""
        links = [
            link for link in self._links.values() if link.model == model and link.state is LinkState.READY
        ]
        if len(links) > 1:
            links.sort(key=lambda link: link.engine_id)
        return links

    async def follow(self) -> None:
        """Keeps the links in step with the registry, for ever."""
        while True:
            try:
                records = await self._breaker.call(self._read_registry)
            except RedisUnavailableError:
                records = []
            for record in records:
                try:
                    self._link_if_new(record)
                except zmq.ZMQError as error:  # an address that is none must not hide the other engines
                    self._report_once(record.engine_id, f"cannot connect to {record.address!r}: {error}")
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    async def close(self) -> None:
        """Ends all links. Aborts have been sent by then: requests end before their engines' links."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._context.destroy(linger=0)

    async def _read_registry(self) -> list[EngineRecord]:
        engine_ids = [
            EngineId(member.decode() if isinstance(member, bytes) else member)
            for member in await self._client.smembers(self._keys.engines)
        ]
        if not engine_ids:
            return []
        values = await self._client.mget([self._keys.engine(engine_id) for engine_id in engine_ids])
        records = []
        for engine_id, value in zip(engine_ids, values, strict=True):
            if value is None:
                await self._client.srem(self._keys.engines, engine_id)  # expired; comes back by itself
                continue
            try:
                records.append(from_json(EngineRecord, value))
            except msgspec.DecodeError as error:
                self._report_once(engine_id, f"its record cannot be read: {error}")
        return records

    def _report_once(self, engine_id: EngineId, problem: str) -> None:
        if self._reported.get(engine_id) != problem:  # the registry is read four times a second
            self._reported[engine_id] = problem
            logger.error("engine %s: %s", engine_id, problem)

    def _link_if_new(self, record: EngineRecord) -> None:
        if record.state != "ready":
            return
        current = self._links.get(record.engine_id)
        if current is not None and current.epoch == record.epoch:
            return
        # The record of an engine that died outlives it. One that is still written after that
        # lifetime shows that only the connection was lost.
        lost_at = self._lost_at.get(record.epoch)
        if lost_at is not None and self._clock() - lost_at < FORGET_LOSS_S:
            return
        link = EngineLink(
            record, self._context, self._gateway_id, self._tokenizers.hashes, self._tokenizers.load
        )
        self._links[record.engine_id] = link
        self._tasks[link] = asyncio.create_task(self._serve(link), name=f"link-{record.engine_id}")
        if current is not None:
            self._tasks[current].cancel()  # a new epoch: the old one is gone even if we had not noticed

    async def _serve(self, link: EngineLink) -> None:
        try:
            await link.run()
        finally:
            self._remember_loss(link.epoch)
            if self._links.get(link.engine_id) is link:
                del self._links[link.engine_id]
            del self._tasks[link]

    def _remember_loss(self, epoch: EngineEpoch) -> None:
        now = self._clock()
        recent = {lost: at for lost, at in self._lost_at.items() if now - at < FORGET_LOSS_S}
        self._lost_at = recent | {epoch: now}
