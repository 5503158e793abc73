"""Where a request runs: chosen by the balancer, and once more if that engine is lost before it answers."""

from __future__ import annotations

from collections.abc import Callable

from gateway.balancer import Balancer, Choice
from gateway.engine_link import EngineLink, EngineLostError
from gateway.engine_pool import EnginePool
from gateway.errors import no_engine


class Placement:
    """The engine of one request. `on_placed` is told of each choice."""

    def __init__(
        self, model: str, pool: EnginePool, balancer: Balancer, on_placed: Callable[[Choice], None]
    ) -> None:
        self._model = model
        self._pool = pool
        self._balancer = balancer
        self._on_placed = on_placed
        self._num_choices = 0
        self.choice: Choice | None = None
        self.link: EngineLink | None = None  # of the last choice

    def choose(self, prefix_hash: str | None, cost_tokens: int) -> EngineLink:
        """An engine that takes requests. Raises ApiError 503 when there is none."""
        engines = self._pool.ready(self._model)
        if not engines:
            raise no_engine(self._model)
        self._num_choices += 1
        self.choice = choice = self._balancer.choose(engines, prefix_hash, cost_tokens)
        self._on_placed(choice)
        self.link = next(engine for engine in engines if engine.engine_id == choice.engine_id)
        return self.link

    def may_move(self, error: EngineLostError) -> bool:
        """Whether there is another engine for a request that has shown nothing yet.

        Once only, and not if a step of the lost one failed: a request that kills engines must not kill
        them all.
        """
        return self._num_choices == 1 and not error.by_a_step and bool(self._pool.ready(self._model))
