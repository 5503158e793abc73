"""What a configuration says about rotary embedding, in both spellings, as a RopeSpec.

transformers 4 writes `rope_theta` beside `rope_scaling`, transformers 5 one `rope_parameters`. Meaning and
defaults of the fields: transformers, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine_service.models.spec import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

Config = Mapping[str, Any]

# Ours, for what GGUF files hold: no configuration of Hugging Face has it.
DIVISORS = "gguf_divisors"
KNOWN_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")


def read_rope(config: Config, head_dim: int, layer_type: str | None = None) -> RopeSpec:
    """`layer_type` chooses where parameters are given per type of layer.

    Raises KeyError or ValueError for a missing or unknown value.
    """
    given: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if layer_type is not None and isinstance(given.get(layer_type), Mapping):
        given = given[layer_type]
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    part = given.get("partial_rotary_factor")
    if part is None:
        part = config.get("partial_rotary_factor")
    rotary_dim = int(head_dim * (1.0 if part is None else float(part)))
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary embedding over {rotary_dim} of {head_dim} dimensions is not supported")
    return RopeSpec(theta, rotary_dim, _read_scaling(config, given, rotary_dim))


def _read_scaling(config: Config, given: Config, rotary_dim: int) -> RopeScaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "long_factor" in given):  # early names of Phi-3's
        kind = "longrope"
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=float(given["factor"]))
        case "llama3":
            return Llama3Scaling(
                factor=float(given["factor"]),
                low_freq_factor=float(given["low_freq_factor"]),
                high_freq_factor=float(given["high_freq_factor"]),
                original_context_len=_original_context_len(config, given),
            )
        case "dynamic":
            return DynamicScaling(float(given["factor"]), int(config["max_position_embeddings"]))
        case "yarn":
            return _read_yarn(config, given)
        case "longrope":
            return _read_longrope(config, given, rotary_dim)
        case _ if kind == DIVISORS:
            return DivisorScaling(tuple(given["divisors"]))
    raise ValueError(f"rotary scaling {kind!r} is not supported; known: {', '.join(KNOWN_TYPES)}")


def _original_context_len(config: Config, given: Config) -> int:
    beside = config.get("original_max_position_embeddings")  # Phi-3's place for it, and it goes first
    within = given.get("original_max_position_embeddings")
    return int(beside or within or config["max_position_embeddings"])


def _read_yarn(config: Config, given: Config) -> YarnScaling:
    original = _original_context_len(config, given)
    factor = given.get("factor")
    factor = float(config["max_position_embeddings"]) / original if factor is None else float(factor)

    def magnitude(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = given.get("attention_factor")
    if attention is None:
        over, under = given.get("mscale"), given.get("mscale_all_dim")
        attention = magnitude(over) / magnitude(under) if over and under else magnitude(1.0)
    return YarnScaling(
        factor=factor,
        original_context_len=original,
        attention_factor=float(attention),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        rounds_borders=bool(given.get("truncate", True)),
    )


def _read_longrope(config: Config, given: Config, rotary_dim: int) -> LongRopeScaling:
    original = _original_context_len(config, given)
    factor = given.get("factor")
    factor = float(config["max_position_embeddings"]) / original if factor is None else float(factor)
    attention = given.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = tuple(map(float, given["short_factor"])), tuple(map(float, given["long_factor"]))
    if not len(short) == len(long) == rotary_dim // 2:
        raise ValueError(f"longrope needs {rotary_dim // 2} short and long factors")
    return LongRopeScaling(short, long, original, float(attention))
