"""The `fake:` source of an embedding model: vectors that follow from nothing but the tokens of their text.

fake:                                          8 numbers, instant passes
fake:step_delay_ms=20,embedding_dim=256        options, separated by commas
fake:die_at_step=3                             the third pass fails
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_service.fake_model import DEFAULT_MAX_MODEL_LEN, parse_options
from engine_service.fake_runner import FakeModelFailure, digest_of, mix
from engine_service.served_embedder import ServedEmbedder, make_card
from shared.byte_text import VOCAB_SIZE, byte_text_bundle
from shared.config import ModelConfig
from shared.errors import ConfigError

_OPTIONS = {"step_delay_ms": 0.0, "embedding_dim": 8.0, "die_at_step": 0.0}


class FakeEmbedder:
    """An EmbeddingModel. Pass number `die_at_step`, counted from 1, raises."""

    def __init__(
        self,
        dim: int,
        *,
        normalises: bool = True,
        step_delay_s: float = 0.0,
        die_at_step: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._dim = dim
        self._normalises = normalises
        self._step_delay_s = step_delay_s
        self._die_at_step = die_at_step
        self._sleep = sleep
        self._num_steps = 0

    def vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        self._num_steps += 1
        if self._num_steps == self._die_at_step:
            raise FakeModelFailure(f"step {self._num_steps} was told to fail")
        if self._step_delay_s:
            self._sleep(self._step_delay_s)
        return np.stack([self.vector(token_ids) for token_ids in texts])

    def vector(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Of one text: `[dim]`, numbers between -1 and 1 before they are scaled to length 1."""
        digest = digest_of(token_ids)
        numbers = []
        for position in range(self._dim):
            digest = mix(digest, position)
            numbers.append((digest >> 40) / 2**23 - 1)
        vector = np.array(numbers, dtype=np.float32)
        return vector / np.linalg.norm(vector) if self._normalises else vector


def load_fake_embedder(config: ModelConfig) -> ServedEmbedder:
    """Raises ConfigError on an option that is unknown or not a number."""
    options = parse_options(config.source, _OPTIONS)
    dim = int(options["embedding_dim"])
    if dim < 1:
        raise ConfigError("embedding_dim of a fake model must be at least 1", "source")
    embedder = FakeEmbedder(
        dim,
        normalises=config.normalize,
        step_delay_s=options["step_delay_ms"] / 1000,
        die_at_step=int(options["die_at_step"]),
    )
    card = make_card(
        config,
        architecture="FakeEmbedder",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or DEFAULT_MAX_MODEL_LEN,
        embedding_dim=dim,
        matryoshka_dimensions=None,
    )
    return ServedEmbedder(embedder, card, byte_text_bundle())
