"""A keeper of the ledger: what experiments make of the requests that have ended, in memory and then in Redis.

A route with more than one variant is an experiment. Each life of a gateway has one record of it, which is
written whole, once a second if it has changed: a write that is repeated, because Redis was slow to answer,
counts nothing twice, and one that could not be made is made up for by the next one. So are the cells of
subjects (see SplitFigures), and the answers that feedback may be about.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import OrderedDict
from functools import partial
from importlib import resources
from typing import Any

import msgspec
import redis.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.routing.draw import Draw
from shared.experiment_figures import (
    MAX_SUBJECT_WEIGHT,
    NUM_GROUPS,
    NUM_SUBJECT_CELLS,
    RATES,
    TIMES,
    AnswerRecord,
    ExperimentRecord,
    RequestCounts,
    bin_of,
    cell_of,
    cluster_of,
)
from shared.identifiers import GatewayId, TenantId
from shared.redis_schema import ANSWER_LIFETIME_S, EXPERIMENT_LIFETIME_S, RedisKeys
from shared.usage import UsageRecord

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 2.0
MAX_SUBJECTS = 20_000  # of one experiment, whose means are known; who was seen longest ago is forgotten
MAX_PENDING_ANSWERS = 20_000  # the oldest of more than these get no feedback
MAX_PENDING_CELLS = 100_000  # subjects of more than these do not count for the split
MAX_PER_BATCH = 500  # answers and cells, each: more at once would make streams wait
FORGOTTEN_AFTER_S = 3600.0  # an experiment without requests leaves the memory, not Redis

_METRICS = (*TIMES, *RATES)
ExperimentKey = tuple[str, int]  # route and version


class Experiment:
    """One version of a route's experiment, as this gateway has seen it since it knows of it."""

    def __init__(self, life: str, now: float) -> None:
        self.life = life
        self.record = ExperimentRecord(began_at=now, updated_at=now)
        self.has_changed = True
        # By subject its number of values and their sum, of each metric. Who is forgotten, or asks another
        # gateway as well, counts as two subjects of one cluster: with more weight, but no less honestly.
        self._subjects: OrderedDict[int, list[float]] = OrderedDict()
        self._known_cells = bytearray(NUM_SUBJECT_CELLS // 8)
        self.pending_cells: dict[int, tuple[str, dict[str, float]]] = {}

    def is_over(self, now: float) -> bool:
        """Whether Redis has all of it, and nothing is added to this life of it any more: readers rely on that
        when they put the records of old lives together."""
        return not self.has_changed and now - self.record.updated_at > FORGOTTEN_AFTER_S

    def add(self, record: UsageRecord, draw: Draw) -> None:
        self.has_changed = True
        self.record.updated_at = time.time()
        cluster = cluster_of(record.subject_hash)
        figures = self.record.variant(record.assigned_variant)
        _count(figures.assigned, record)
        values = _values_of(record)
        for number, value in values:
            weight, product = (
                (1.0, value)  # each request is a subject
                if draw.is_per_request
                else self._weigh(record.subject_hash, number, value)
            )
            sums = figures.cluster_sums(_METRICS[number])
            sums.weights[cluster] += weight
            sums.sums[cluster] += product
        served = self.record.variant(record.variant)
        _count(served.served, record)
        for number, value in values:
            if number < len(TIMES):
                bin_ = bin_of(math.exp(value))
                for histogram in (
                    figures.histogram_groups(_METRICS[number])[cluster % NUM_GROUPS],
                    served.served_histograms.setdefault(_METRICS[number], {}),
                ):
                    histogram[bin_] = histogram.get(bin_, 0) + 1
        self._note_subject(record, draw)

    def _weigh(self, subject_hash: int, number: int, value: float) -> tuple[float, float]:
        """What another value of a metric adds to the subject's weight, and to its weight times its mean."""
        state = self._subjects.get(subject_hash)
        if state is None:
            state = self._subjects[subject_hash] = [0.0] * (2 * len(_METRICS))
            if len(self._subjects) > MAX_SUBJECTS:
                self._subjects.popitem(last=False)
        else:
            self._subjects.move_to_end(subject_hash)
        count, total = state[2 * number], state[2 * number + 1]
        state[2 * number], state[2 * number + 1] = count + 1, total + value
        weight_before = min(count, MAX_SUBJECT_WEIGHT)
        weight = min(count + 1, MAX_SUBJECT_WEIGHT)
        product_before = weight_before * total / count if count else 0.0
        return weight - weight_before, weight * (total + value) / (count + 1) - product_before

    def _note_subject(self, record: UsageRecord, draw: Draw) -> None:
        cell = cell_of(record.subject_hash)
        if self._known_cells[cell >> 3] & (1 << (cell & 7)) or len(self.pending_cells) >= MAX_PENDING_CELLS:
            return
        self._known_cells[cell >> 3] |= 1 << (cell & 7)
        if shares := draw.shares:
            self.pending_cells[cell] = (record.assigned_variant, shares)


class ExperimentFigures:
    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        breaker: RedisBreaker,
        gateway_id: GatewayId,
    ) -> None:
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._gateway_id = gateway_id
        self._num_lives = 0
        self._experiments: dict[ExperimentKey, Experiment] = {}
        self._answers: dict[tuple[TenantId, str], AnswerRecord] = {}  # that are still to be written
        # One command for many: each by itself would cost more than all else that is kept of an answer.
        self._remember: Any = client.register_script(
            resources.files("gateway").joinpath("answers.lua").read_text()
        )

    def keep(self, record: UsageRecord, draw: Draw) -> None:
        """Counts the request for the split that has assigned it, whatever the policy in force says now."""
        key = (record.route, record.experiment_version)
        experiment = self._experiments.get(key)
        if experiment is None or experiment.is_over(time.time()):
            self._num_lives += 1
            experiment = Experiment(f"{self._gateway_id}.{self._num_lives}", time.time())
            self._experiments[key] = experiment
        experiment.add(record, draw)
        if record.response_id is not None:
            if len(self._answers) >= MAX_PENDING_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[record.tenant, record.response_id] = AnswerRecord(
                *key, record.assigned_variant, cluster_of(record.subject_hash)
            )

    async def follow(self) -> None:
        """Writes for ever."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def close(self) -> None:
        """The last write. Does not wait for a Redis that is away."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
        except TimeoutError:
            logger.warning("the last figures of experiments are not written: Redis is too slow")

    async def flush(self) -> None:
        """Writes what there is to be written; what Redis does not take is tried again by the next call."""
        try:
            while self._answers:
                await self._breaker.call(self._write_answers)
            for key, experiment in list(self._experiments.items()):
                while experiment.pending_cells:
                    await self._breaker.call(partial(self._write_cells, key, experiment))
                if experiment.has_changed:
                    await self._breaker.call(partial(self._write_record, key, experiment))
                elif experiment.is_over(time.time()):
                    del self._experiments[key]
        except RedisUnavailableError:
            return  # the breaker has logged it

    def pending_answer(self, tenant: TenantId, response_id: str) -> AnswerRecord | None:
        """Of an answer that is not in Redis yet."""
        return self._answers.get((tenant, response_id))

    async def _write_answers(self) -> None:
        """Some of those of one tenant, whose keys lie in one slot of a cluster."""
        tenant, _ = next(iter(self._answers))
        its_own = (each for each in self._answers.items() if each[0][0] == tenant)
        batch = list(itertools.islice(its_own, MAX_PER_BATCH))
        await self._remember(
            keys=[self._keys.answer(tenant, response_id) for (_, response_id), _ in batch],
            args=[ANSWER_LIFETIME_S, *(msgspec.json.encode(answer) for _, answer in batch)],
            client=self._client,
        )
        for answer_key, _ in batch:
            self._answers.pop(answer_key, None)

    async def _write_cells(self, key: ExperimentKey, experiment: Experiment) -> None:
        batch = dict(list(experiment.pending_cells.items())[:MAX_PER_BATCH])
        name = self._keys.experiment_subjects(*key)
        async with self._client.pipeline(transaction=False) as pipe:
            for cell in batch:
                pipe.setbit(name, cell, 1)
            pipe.expire(name, EXPERIMENT_LIFETIME_S)
            was_taken = await pipe.execute()
        # Where an answer of Redis was lost on its way, the bit is found set, and the subject does not count.
        for (cell, (variant, shares)), taken in zip(batch.items(), was_taken, strict=False):
            del experiment.pending_cells[cell]
            if not taken:
                experiment.record.split.count(variant, shares)
                experiment.has_changed = True

    async def _write_record(self, key: ExperimentKey, experiment: Experiment) -> None:
        document = msgspec.json.encode(experiment.record)
        experiment.has_changed = False
        name = self._keys.experiment(*key)
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hset(name, experiment.life, document)
                pipe.expire(name, EXPERIMENT_LIFETIME_S)
                pipe.sadd(self._keys.experiments, f"{key[0]}:{key[1]}")
                await pipe.execute()
        except BaseException:  # also while being cancelled: close() is still to come
            experiment.has_changed = True
            raise


def _count(counts: RequestCounts, record: UsageRecord) -> None:
    counts.requests += 1
    counts.input_tokens += record.input_tokens
    counts.cached_tokens += record.cached_tokens
    counts.output_tokens += record.output_tokens
    counts.outcomes[record.outcome] = counts.outcomes.get(record.outcome, 0) + 1
    for reason in record.finish_reasons:
        counts.finish_reasons[reason] = counts.finish_reasons.get(reason, 0) + 1


def _values_of(record: UsageRecord) -> list[tuple[int, float]]:
    """The metrics that a request has, by their places in _METRICS: none if it was refused."""
    if record.outcome == "refused":
        return []
    is_ok = record.outcome == "ok"
    times = (
        record.time_to_first_token_s,
        record.time_per_output_token_s if is_ok else None,
        record.duration_s if is_ok else None,
    )
    values = [(number, math.log(time_s)) for number, time_s in enumerate(times) if time_s]
    first_rate = len(TIMES)
    values.append((first_rate, float(record.outcome == "failed")))
    values.append((first_rate + 1, float(record.outcome == "aborted")))
    return values
