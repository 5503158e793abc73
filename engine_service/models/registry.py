"""From a model's shape and weights to the object that computes it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from torch import Tensor

from engine_service.kv_cache import KVCache
from engine_service.models.decoder import DecoderModel
from engine_service.models.linear import Linears
from engine_service.models.spec import DecoderSpec, ModelSpec
from engine_service.models.transformers_module import TransformersModel, TransformersModule
from engine_service.models.weights import DecoderWeights
from kernels.attention_metadata import AttentionMetadata
from kernels.operators import Operators

Weights = DecoderWeights | TransformersModule


class Model(Protocol):
    """One forward pass over the flat tokens of a step. Writes the step's slots of the KV cache."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        """Logits of some tokens; keys and values of all.

        token_ids, positions: int64 `[num_tokens]`. logit_rows: int64 `[num_logits]`, which tokens'
        logits are wanted. Returns float32 `[num_logits, vocab]`.
        """

    def forward_in_parts(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        parts: SequenceOf[Tensor],
    ) -> Iterator[Tensor]:
        """As `forward` for each of several `logit_rows`, so that the logits of all never exist at once.

        Keys and values are written when the first part has been taken.
        """


def build_model(
    spec: ModelSpec,
    weights: Weights,
    operators: Operators,
    *,
    num_positions: int,
    linears: Linears | None = None,
) -> Model:
    """num_positions: the longest sequence that will be computed. linears: as in DecoderModel."""
    if isinstance(weights, TransformersModule):
        return TransformersModel(weights, operators)
    assert isinstance(spec, DecoderSpec), "our own weights come with a spec of our own families"
    return DecoderModel(spec, weights, operators, num_positions=num_positions, linears=linears)
