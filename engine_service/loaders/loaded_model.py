"""What every loader returns."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.models.spec import ModelSpec
from engine_service.models.weights import LlamaWeights
from shared.text_bundle import TextBundle


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, and all that gateways need to speak to the model. Runners may share it."""

    spec: ModelSpec
    weights: LlamaWeights
    text_bundle: TextBundle
