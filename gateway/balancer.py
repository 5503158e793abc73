"""Which engine runs a request: where its prefix is cached, unless that engine has too much to do."""

from __future__ import annotations

import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from shared.identifiers import EngineEpoch, EngineId

Reason = str  # "affinity" | "hash" | "bounded" | "least_loaded" | "only"

LOAD_FACTOR = 1.15  # a new prefix goes to its own engine up to this many times the mean load
AFFINITY_LOAD_FACTOR = 1.5  # a known one stays up to this many times the mean ...
AFFINITY_SLACK_TOKENS = 2048  # ... or while it waits for no more than this above the mean
SETTLED_HALF_LIFE_S = 60.0
MAX_REMEMBERED_PREFIXES = 50_000
MAX_REMEMBERED_ENGINES = 256


class Candidate(Protocol):
    """An engine as the balancer sees it."""

    engine_id: EngineId
    epoch: EngineEpoch

    @property
    def load_tokens(self) -> int: ...


class Choice(NamedTuple):
    engine_id: EngineId
    reason: Reason


class Balancer:
    """Consistent hashing with bounded loads (arXiv 1608.01350), with a memory of where prefixes went.

    A prefix that was seen before goes where its blocks lie; the memory is written when the decision
    is made, so that the next turn finds it while this one still runs. A new prefix goes to the first
    engine in its own order (rendezvous hashing, so an engine that comes or goes moves only its
    share) whose load stays within `LOAD_FACTOR` of the mean, this request included. Load here is
    what waits, or the new prefixes that were recently settled (half-life one minute) if those are more:
    at low rates nothing waits, and chance alone would pile prefixes up on one engine. Not the sum: what
    was just settled and still runs would count twice, and most on the slower engine. A request without
    a prefix worth keeping goes to the least loaded engine, ties by lot.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        max_remembered: int = MAX_REMEMBERED_PREFIXES,
    ) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._max_remembered = max_remembered
        self._home: OrderedDict[str, tuple[EngineId, EngineEpoch]] = OrderedDict()
        self._settled: dict[EngineId, _DecayingSum] = {}

    def choose(self, engines: Sequence[Candidate], prefix: str | None, cost_tokens: int) -> Choice:
        """The engine for a request of this cost. `prefix` is a hash, None if too short to matter."""
        assert engines, "the caller answers 503 when there is no engine"
        choice, engine = self._decide(engines, prefix, cost_tokens)
        if prefix is not None:
            self._home[prefix] = (engine.engine_id, engine.epoch)
            self._home.move_to_end(prefix)
            if len(self._home) > self._max_remembered:
                self._home.popitem(last=False)
        return choice

    def _decide(
        self, engines: Sequence[Candidate], prefix: str | None, cost_tokens: int
    ) -> tuple[Choice, Candidate]:
        if len(engines) == 1:
            return Choice(engines[0].engine_id, "only"), engines[0]
        if prefix is None:
            lightest = min(engines, key=lambda engine: (engine.load_tokens, self._rng.random()))
            return Choice(lightest.engine_id, "least_loaded"), lightest
        home = self._home_of(prefix, engines)
        if home is not None and self._may_stay(home, engines, cost_tokens):
            return Choice(home.engine_id, "affinity"), home
        return self._by_hash(engines, prefix, cost_tokens)

    def _home_of(self, prefix: str, engines: Sequence[Candidate]) -> Candidate | None:
        where = self._home.get(prefix)
        # The epoch is part of it: a restarted engine has an empty cache.
        return next((engine for engine in engines if (engine.engine_id, engine.epoch) == where), None)

    def _may_stay(self, home: Candidate, engines: Sequence[Candidate], cost_tokens: int) -> bool:
        mean = (sum(engine.load_tokens for engine in engines) + cost_tokens) / len(engines)
        load = home.load_tokens + cost_tokens
        return load <= AFFINITY_LOAD_FACTOR * mean or load <= mean + AFFINITY_SLACK_TOKENS

    def _by_hash(
        self, engines: Sequence[Candidate], prefix: str, cost_tokens: int
    ) -> tuple[Choice, Candidate]:
        engine, is_first = self._settle(engines, prefix, cost_tokens, self._clock())
        return Choice(engine.engine_id, "hash" if is_first else "bounded"), engine

    def _settle(
        self, engines: Sequence[Candidate], prefix: str, cost_tokens: int, now: float
    ) -> tuple[Candidate, bool]:
        """A home for a new prefix, and whether it is the first in the prefix's own order."""
        if len(self._settled) > MAX_REMEMBERED_ENGINES:  # names of engines that are long gone
            self._settled = {name: sum_ for name, sum_ in self._settled.items() if sum_.value(now) >= 1}
        loads = {
            e.engine_id: max(e.load_tokens, self._settled.setdefault(e.engine_id, _DecayingSum()).value(now))
            for e in engines
        }
        bound = LOAD_FACTOR * (sum(loads.values()) + cost_tokens) / len(engines)
        order = sorted(engines, key=lambda engine: _score(prefix, engine.engine_id), reverse=True)
        within_bound = (e for e in order if loads[e.engine_id] + cost_tokens <= bound)
        # Few engines and a large request: nobody may stay within the bound.
        chosen = next(within_bound, None) or min(order, key=lambda e: loads[e.engine_id])
        self._settled[chosen.engine_id].add(cost_tokens, now)
        return chosen, chosen is order[0]


class _DecayingSum:
    """A sum that halves every `SETTLED_HALF_LIFE_S`."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        return float(self._sum * 0.5 ** ((now - self._at) / SETTLED_HALF_LIFE_S))


def _score(prefix: str, engine_id: EngineId) -> bytes:
    return hashlib.blake2b(f"{prefix}\n{engine_id}".encode(), digest_size=8).digest()
