"""An embedding model ready to compute, and the engine around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine_service.embedding_engine import EmbeddingEngine, EmbeddingModel
from engine_service.embedding_queue import EmbeddingPolicy, Text
from engine_service.fair_share import FairShare
from engine_service.scheduling_policy import FirstComeFirstServed
from shared.config import ModelConfig
from shared.messages import ModelCard
from shared.text_bundle import TextBundle

POLICIES: Mapping[str, Callable[[], EmbeddingPolicy]] = MappingProxyType(
    {"fair_share": FairShare[Text], "fcfs": FirstComeFirstServed[Text]}
)


@dataclass(frozen=True, slots=True)
class ServedEmbedder:
    """What the source of an embedding model gives, as `ServedModel` is that of a generating one."""

    model: EmbeddingModel
    card: ModelCard
    text_bundle: TextBundle


def build_embedding_engine(config: ModelConfig, served: ServedEmbedder) -> EmbeddingEngine:
    return EmbeddingEngine(served.model, served.card, config, POLICIES[config.scheduling_policy]())


def make_card(
    config: ModelConfig,
    *,
    architecture: str,
    vocab_size: int,
    max_model_len: int,
    embedding_dim: int,
    matryoshka_dimensions: list[int] | None,
) -> ModelCard:
    """What gateways are told. `matryoshka_dimensions` is what the model's files declare."""
    if config.is_matryoshka is not None:
        matryoshka_dimensions = (matryoshka_dimensions or []) if config.is_matryoshka else None
    return ModelCard(
        name=config.name,
        architecture=architecture,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=0,
        dtype=config.dtype,
        eos_token_ids=[],
        runner="pooling",
        embedding_dim=embedding_dim,
        matryoshka_dimensions=matryoshka_dimensions,
    )
