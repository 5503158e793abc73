"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine_service.models.llama import LlamaModel
from shared.errors import ConfigError

# All of these compute the same function; what differs (biases, heads, rotary scaling) is in the ModelSpec.
ARCHITECTURES: Mapping[str, type[LlamaModel]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaModel,
        "MistralForCausalLM": LlamaModel,
        "Qwen2ForCausalLM": LlamaModel,
    }
)


def model_class(architecture: str) -> type[LlamaModel]:
    """Raises ConfigError, listing the known architectures, for any other."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; known: {', '.join(sorted(ARCHITECTURES))}",
            "source",
        )
    return ARCHITECTURES[architecture]
