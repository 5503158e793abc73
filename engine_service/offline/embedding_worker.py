"""An embedding model in a thread of this process, for calls of any other thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_service.compute_thread import ComputeThread, ThreadEnded
from engine_service.embedding_engine import check_text, shortened
from engine_service.main import load_served_embedder
from engine_service.offline.failures import EngineFailedError
from engine_service.refusal import Refusal
from engine_service.served_embedder import ServedEmbedder
from shared.config import ModelConfig
from shared.embedding_limits import dim_of
from shared.errors import InvalidRequest
from shared.messages import ModelCard
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 30.0  # for the pass that is being computed


class EmbeddingWorker:
    """Owns the model, which is loaded, used and freed in the compute thread.

    Calls of several threads take turns pass by pass. One that is interrupted leaves nothing behind but the
    pass that is being computed.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Loads the model. Raises ConfigError."""
        self._config = config
        self._compute = ComputeThread()
        self._served: ServedEmbedder | None = None
        try:
            self.card, text_bundle = self._compute.call(self._load)
        except BaseException:  # Ctrl-C while it loads
            self._compute.close()
            raise
        self.tokenizer = Tokenizer(text_bundle)

    def check(self, text: Sequence[int], dimensions: int | None) -> None:
        """Raises ValueError for what the model cannot do."""
        try:
            check_text(text, self.card, "prompts")
            dim_of(dimensions, self.card)
        except Refusal as refusal:
            raise ValueError(refusal.message) from refusal
        except InvalidRequest as error:
            raise ValueError(f"{error.param}: {error.message}") from error

    def embed(
        self, texts: Sequence[Sequence[int]], dimensions: int | None, on_pass: Callable[[int, int], None]
    ) -> list[list[float]]:
        """One vector for each text, all of which fit. `on_pass` is told numbers of tokens and of texts.

        Raises EngineFailedError.
        """
        vectors: list[list[float]] = []
        for group in self._passes(texts):
            try:
                computed = self._compute.call(lambda group=group: self._vectors(group))  # type: ignore[misc]
            except ThreadEnded as error:
                raise EngineFailedError("it was shut down") from error
            except EngineFailedError:
                raise
            except Exception as error:  # of the model: anything
                logger.exception("a pass failed")
                # Without its frames, which would keep the model.
                raise EngineFailedError(f"a pass failed: {error}") from error.with_traceback(None)
            for vector in computed:
                if not np.isfinite(vector).all():
                    raise EngineFailedError(f"the vector of prompts[{len(vectors)}] is not finite")
                short = shortened(vector, dimensions, normalises=self._config.normalize)
                vectors.append(short.tolist())
            on_pass(sum(map(len, group)), len(group))
        return vectors

    def close(self) -> None:
        """Frees the model, after the pass that is being computed. Idempotent."""
        with contextlib.suppress(ThreadEnded):
            self._compute.start(self._free)
        self._compute.close()
        self._compute.join(_END_TIMEOUT_S)  # the garbage collector may call this in that very thread

    def _passes(self, texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        group: list[Sequence[int]] = []
        num_tokens = 0
        for text in texts:
            is_full = (
                len(group) == self.card.max_num_seqs
                or num_tokens + len(text) > self._config.max_num_batched_tokens
            )
            if group and is_full:
                yield group
                group, num_tokens = [], 0
            group.append(text)
            num_tokens += len(text)
        if group:
            yield group

    def _load(self) -> tuple[ModelCard, TextBundle]:
        self._served = load_served_embedder(self._config)
        return self._served.card, self._served.text_bundle

    def _vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        if self._served is None:
            raise EngineFailedError("it was shut down")
        return self._served.model.vectors(texts)

    def _free(self) -> None:
        self._served = None
