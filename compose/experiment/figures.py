"""The figures of experiments, as they lie in Redis."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from shared.errors import ConfigError
from shared.experiment_figures import (
    FEEDBACK_UNITS,
    NUM_SUBJECT_CELLS,
    ClusterSums,
    CommentRecord,
    ExperimentRecord,
    sum_of,
)
from shared.identifiers import TenantId
from shared.redis_schema import PolicyRecord, RedisKeys, from_json
from shared.route_config import RouteConfig

MAX_LIVES = 16  # of gateways, whose records of an experiment are kept apart
FOLD_AFTER_S = 7 * 86_400  # since a life's last request; gateways write nothing to it after an hour


@dataclass(frozen=True, slots=True)
class ExperimentName:
    route: str
    version: int


@dataclass(frozen=True, slots=True)
class Feedback:
    """`sums`: by variant, of scores from -1 to 1. `comments`: as many as are kept."""

    sums: dict[str, ClusterSums] = field(default_factory=dict)
    comments: list[CommentRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ExperimentFigures:
    """What all gateways have seen of an experiment. `num_subjects`: over all variants, by linear counting."""

    name: ExperimentName
    record: ExperimentRecord
    feedback: Feedback
    num_subjects: int
    route: RouteConfig | None  # as the policy has it now; None: it does not know the route any more
    other_versions: list[int] = field(default_factory=list)  # of which there are figures, too

    @property
    def is_in_force(self) -> bool:
        """Whether the route assigns by this version now."""
        return self.route is not None and self.route.version == self.name.version

    @property
    def did_split(self) -> bool:
        """Whether two variants were assigned something, or are to be: else it is about a route that has
        others for fallbacks, overrides or shadow traffic only."""
        variants = self.record.variants.values()
        was_split = sum(one.assigned.requests > 0 for one in variants) > 1
        return was_split or (self.is_in_force and self.route is not None and self.route.splits_traffic)


class ExperimentStore:
    """All methods may raise redis.RedisError."""

    def __init__(self, client: Any, keys: RedisKeys, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._keys = keys
        self._clock = clock

    def names(self) -> list[ExperimentName]:
        """By route, the oldest version first. Forgets those whose figures have expired."""
        names = []
        for member in sorted(self._client.smembers(self._keys.experiments)):
            route, _, version = member.decode().rpartition(":")
            if self._client.exists(self._keys.experiment(route, int(version))):
                names.append(ExperimentName(route, int(version)))
            else:
                self._client.srem(self._keys.experiments, member)
        return sorted(names, key=lambda name: (name.route, name.version))

    def read(self, name: ExperimentName) -> ExperimentFigures | None:
        """None: there are none. Raises msgspec.DecodeError for those of another version of Headrace."""
        of_experiment = (name.route, name.version)
        self._fold(self._keys.experiment(*of_experiment))
        records = self._client.hvals(self._keys.experiment(*of_experiment))
        record = sum_of(msgspec.json.decode(value, type=ExperimentRecord) for value in records)
        if record is None:
            return None
        num_cells = self._client.bitcount(self._keys.experiment_subjects(*of_experiment))
        others = [other.version for other in self.names() if other.route == name.route and other != name]
        return ExperimentFigures(
            name, record, self._feedback(name), _linear_count(num_cells), self._route(name.route), others
        )

    def find(self, route: str, version: int | None = None) -> ExperimentFigures:
        """Those of a version; by default of the one in force, or, if the policy has no such route any more,
        of the one that was asked last.

        Raises ConfigError if there are none, and msgspec.DecodeError as `read` does."""
        known = [name for name in self.names() if name.route == route]
        what = f"{route!r}" if version is None else f"{route!r}, version {version}"
        if version is None and known and (in_force := self._route(route)) is not None:
            version = in_force.version
            what = f"{route!r}, version {version}, which is in force"
        found = [
            figures
            for name in known
            if version in (None, name.version) and (figures := self.read(name)) is not None
        ]
        if found:
            return max(found, key=lambda figures: figures.record.updated_at)
        numbers = ", ".join(str(name.version) for name in known)
        there_are = f"; there are those of --version {numbers}" if known else ""
        raise ConfigError(
            f"there are no figures of {what}{there_are}; see `headrace experiment list`", "NAME"
        )

    def _fold(self, key: str) -> None:
        """Puts the records of old lives into one, so that many restarts do not fill Redis."""
        with self._client.pipeline() as pipe:
            pipe.watch(key)
            fields = pipe.hgetall(key)
            if len(fields) <= MAX_LIVES:
                return
            records = {
                life: msgspec.json.decode(text, type=ExperimentRecord) for life, text in fields.items()
            }
            last_moment = self._clock() - FOLD_AFTER_S
            old = {life: record for life, record in records.items() if record.updated_at < last_moment}
            total = sum_of(old.values())
            if total is None or len(old) < 2:
                return
            folded = min(old)
            pipe.multi()
            # Set first: without a field the hash would go, and its lifetime with it.
            pipe.hset(key, folded, msgspec.json.encode(total))
            pipe.hdel(key, *(life for life in old if life != folded))
            with contextlib.suppress(redis.WatchError):  # a gateway wrote meanwhile: next time, then
                pipe.execute()

    def _route(self, name: str) -> RouteConfig | None:
        """As it is in force."""
        stored = self._client.get(self._keys.policy)
        routes = [] if stored is None else from_json(PolicyRecord, stored).routes_in_force
        return next((route for route in routes if route.name == name), None)

    def _feedback(self, name: ExperimentName) -> Feedback:
        feedback = Feedback()
        of_experiment = (name.route, name.version)
        for tenant in self._client.smembers(self._keys.experiment_tenants(*of_experiment)):
            tenant_id = TenantId(tenant.decode())
            fields = self._client.hgetall(self._keys.experiment_feedback(tenant_id, *of_experiment))
            for variant, cluster, kind, value in _parsed(fields):
                sums = feedback.sums.setdefault(variant, ClusterSums())
                if kind == "count":
                    sums.weights[cluster] += value
                else:
                    sums.sums[cluster] += value / FEEDBACK_UNITS
            comments = self._client.hvals(self._keys.experiment_comments(tenant_id, *of_experiment))
            feedback.comments.extend(msgspec.json.decode(text, type=CommentRecord) for text in comments)
        return feedback


def _parsed(fields: dict[bytes, bytes]) -> Iterator[tuple[str, int, str, int]]:
    """See shared.experiment_figures.feedback_fields."""
    for name, value in fields.items():
        variant, cluster, kind = name.decode().split(" ")
        yield variant, int(cluster), kind, int(value)


def _linear_count(num_cells: int) -> int:
    """Subjects that have left so many cells taken (Whang, Vander-Zanden & Taylor 1990)."""
    num_free = max(1, NUM_SUBJECT_CELLS - num_cells)
    return round(NUM_SUBJECT_CELLS * math.log(NUM_SUBJECT_CELLS / num_free))
