"""What every loader returns."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.models.registry import Weights
from engine_service.models.spec import ModelSpec
from shared.text_bundle import TextBundle


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, and all that gateways need to speak to the model. Runners may share it."""

    spec: ModelSpec
    weights: Weights
    text_bundle: TextBundle
