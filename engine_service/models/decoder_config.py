"""From a configuration to the shape of one of our decoders.

A configuration is config.json's content; the GGUF loader writes one from its metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from engine_service.models.families import FAMILIES, Family
from engine_service.models.rope_config import Config
from engine_service.models.spec import DecoderSpec, DynamicScaling, LayerSpec
from shared.errors import ConfigError

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)


def read_decoder_spec(given: Config, architecture: str) -> DecoderSpec:
    """Raises ConfigError for a value that is missing, malformed or beyond what we compute."""
    family = FAMILIES[architecture]
    try:
        own = given[family.nested_field] if family.nested_field else given
        spec = _read(family, {**family.defaults, **own}, architecture)
        _check_shape(spec)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"the configuration of the model: a value is missing, malformed or not supported: {error}",
            "source",
        ) from error
    return spec


def _check_shape(spec: DecoderSpec) -> None:
    """Raises ValueError for numbers that no operator is made for, and that only a step would run into."""
    sizes = (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.context_len)
    if min(*sizes, spec.num_heads, spec.num_kv_heads, spec.head_dim) < 1:
        raise ValueError("a size is below 1")
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads")
    for layer in spec.layers:
        experts = layer.experts
        if experts is not None and not 1 <= experts.num_experts_per_token <= experts.num_experts:
            raise ValueError(f"{experts.num_experts_per_token} of {experts.num_experts} experts per token")


def _read(family: Family, config: Config, architecture: str) -> DecoderSpec:
    activation = config.get(family.activation_field, "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r}; known: {', '.join(_ACTIVATIONS)}")
    if config.get("use_bidirectional_attention"):
        raise ValueError("attention in both directions")
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_layers = int(config["num_hidden_layers"])
    has_bias = family.has_attention_bias_field and bool(config.get("attention_bias", False))
    layers = tuple(
        LayerSpec(
            window=_positive(family.window(config, index)),
            rope=family.rope(config, head_dim, index),
            experts=family.experts(config, index),
        )
        for index in range(num_layers)
    )
    if not family.rotates_part_of_head and any(
        layer.rope is not None and layer.rope.rotary_dim != head_dim for layer in layers
    ):
        raise ValueError("rotary embedding over a part of the dimensions")
    context_len = int(config["max_position_embeddings"])
    return DecoderSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        context_len=context_len,
        extended_context_len=_extended(context_len, layers),
        has_tied_head=bool(config.get("tie_word_embeddings", False)),
        layers=layers,
        attention_scale=_attention_scale(family, config, head_dim),
        activation=_ACTIVATIONS[activation],
        attention_softcap=_optional_float(config.get("attn_logit_softcapping")),
        logit_softcap=_optional_float(config.get("final_logit_softcapping")),
        embedding_multiplier=_embedding_multiplier(family, config),
        residual_multiplier=float(config.get("residual_multiplier", 1.0)),
        logit_divisor=float(config.get("logits_scaling", 1.0)),
        norm_offset=family.norm_offset,
        has_qkv_bias=has_bias or family.always_has_qkv_bias,
        has_output_bias=has_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_query_key_norm=family.has_query_key_norm,
        has_post_norms=family.has_post_norms,
    )


def _extended(context_len: int, layers: tuple[LayerSpec, ...]) -> int:
    """Only dynamic scaling goes on past max_position_embeddings: the others count it in."""
    scalings = [layer.rope.scaling for layer in layers if layer.rope is not None]
    stretched = [int(context_len * each.factor) for each in scalings if isinstance(each, DynamicScaling)]
    return max([context_len, *stretched])


def _embedding_multiplier(family: Family, config: Config) -> float:
    if family.scales_embedding:
        return math.sqrt(int(config["hidden_size"]))
    return float(config.get("embedding_multiplier", 1.0))


def _attention_scale(family: Family, config: Config, head_dim: int) -> float:
    if family.scale_field is not None:
        return float(config[family.scale_field])
    if family.inverse_square_scale_field is not None:
        return 1 / math.sqrt(float(config[family.inverse_square_scale_field]))
    return 1 / math.sqrt(head_dim)


def _positive(window: int | None) -> int | None:
    if window is None:
        return None
    if int(window) < 1:
        raise ValueError(f"sliding_window is {window}")
    return int(window)


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)
