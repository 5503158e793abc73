"""Which models the C++ computes whole steps of, and how it is handed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_service.models.linear import SideBySide
from engine_service.models.spec import DecoderSpec, LayerSpec, RopeSpec
from kernels.cpu.native_decoder import NativeDecoder, NativeLayer
from kernels.cpu.operators import CpuOperators
from kernels.cpu.packed_linear import LinearLibrary, PackedLinear
from kernels.operators import Operators

if TYPE_CHECKING:
    from engine_service.models.decoder import DecoderLayer


def native_decoder(
    spec: DecoderSpec,
    layers: Sequence[DecoderLayer],
    norm: Tensor,
    tables: Mapping[RopeSpec, tuple[Tensor, Tensor]],
    operators: Operators,
) -> NativeDecoder | None:
    """None for a model that is not in float32, has a matrix that is not packed, or has experts."""
    if not isinstance(operators, CpuOperators) or norm.dtype != torch.float32:
        return None
    native = [_native_layer(layer, of, tables) for layer, of in zip(layers, spec.layers, strict=True)]
    whole = [layer for layer in native if layer is not None]
    if len(whole) < len(native):
        return None
    return NativeDecoder(
        whole,
        norm,
        num_heads=spec.num_heads,
        norm_eps=spec.rms_norm_eps,
        attention_scale=spec.attention_scale,
        attention_softcap=spec.attention_softcap,
        residual_multiplier=spec.residual_multiplier,
        team=operators.team,
        library=LinearLibrary(),
    )


def _native_layer(
    layer: DecoderLayer, spec: LayerSpec, tables: Mapping[RopeSpec, tuple[Tensor, Tensor]]
) -> NativeLayer | None:
    attention_output, gated, down = layer.attention_output, layer.gated, layer.down
    qkv = layer.qkv.layers if isinstance(layer.qkv, SideBySide) else (layer.qkv,)
    packed_qkv = tuple(part for part in qkv if isinstance(part, PackedLinear))
    if not (
        len(packed_qkv) == len(qkv)
        and isinstance(attention_output, PackedLinear)
        and isinstance(gated, PackedLinear)
        and isinstance(down, PackedLinear)
    ):
        return None
    return NativeLayer(
        qkv=packed_qkv,
        attention_output=attention_output,
        gated=gated,
        down=down,
        input_norm=layer.input_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        post_attention_norm=layer.post_attention_norm,
        mlp_norm=layer.mlp_norm,
        post_mlp_norm=layer.post_mlp_norm,
        rotary=None if spec.rope is None else tables[spec.rope],
        window=spec.window,
    )
