"""A decoder's forward pass over one step as one call of C++ (decoder.h), with no Python between layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.packed_linear import LinearLibrary, PackedLinear
from kernels.cpu.paged_cache import PagedCache
from kernels.cpu.team import Team

_MOST_QKV_PARTS = 3  # kMostQkvParts of decoder.h


class _Layer(ctypes.Structure):
    """`DecoderLayer` of decoder.h."""

    _fields_ = (
        ("qkv", c_void_p * _MOST_QKV_PARTS),
        ("attention_output", c_void_p),
        ("gated", c_void_p),
        ("down", c_void_p),
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary_half", c_int64),
        ("window", c_int64),
    )


class _Decoder(ctypes.Structure):
    """`Decoder` of decoder.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("norm", c_void_p),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
        ("attention_softcap", c_float),
        ("residual_multiplier", c_float),
    )


class _Step(ctypes.Structure):
    """`DecoderStep` of decoder.h."""

    _fields_ = (
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("max_blocks", c_int64),
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """What a layer computes with; norms are float32 `[width]`. What it does not have is None."""

    qkv: tuple[PackedLinear, ...]  # one for all, or up to three side by side
    attention_output: PackedLinear
    gated: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    post_mlp_norm: Tensor | None
    rotary: tuple[Tensor, Tensor] | None  # cos and sin, float32 `[num_positions, half of the rotated width]`
    window: int | None  # keys that a token sees, its own included


class NativeDecoder:
    """The layers and the last norm of a model, in float32, with packed matrices. Not thread-safe."""

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        norm: Tensor,
        *,
        num_heads: int,
        norm_eps: float,
        attention_scale: float,
        attention_softcap: float | None,
        residual_multiplier: float,
        team: Team,
        library: LinearLibrary,
    ) -> None:
        """`team` and `library` are those of the packed matrices."""
        self._kept = (tuple(layers), norm, team)  # the C++ holds their addresses
        self._hidden = norm.shape[0]
        self._layers = (_Layer * len(layers))(*map(_described, layers))
        self._decoder = _Decoder(
            ctypes.addressof(self._layers),
            len(layers),
            self._hidden,
            num_heads,
            norm.data_ptr(),
            norm_eps,
            attention_scale,
            attention_softcap or 0.0,
            residual_multiplier,
        )
        self._team = team
        self._step = library.library.headrace_decoder_step
        self._step.argtypes = [c_void_p] * 6
        self._step.restype = None
        self._keys: Sequence[Tensor] = ()  # of the cache that `_caches` describes
        self._caches = (PagedCache * 0)()

    def hidden_states(
        self,
        residual: Tensor,
        positions: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        metadata: AttentionMetadata,
        rows: Tensor,
    ) -> Tensor:
        """float32 `[len(rows), hidden]` after the last norm, of the tokens `rows`.

        `residual`: float32 `[num_tokens, hidden]`, the embedded tokens; changed in place. `positions` and
        `rows` are int64. `keys` and `values` are each layer's cache; this step's are written to them.
        """
        if keys is not self._keys:
            pairs = zip(keys, values, strict=True)
            self._caches = (PagedCache * len(keys))(*(PagedCache.of(key, value) for key, value in pairs))
            self._keys = keys
        step = _Step(
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.context_lens.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.block_tables.shape[1],
            residual.shape[0],
            metadata.num_seqs,
            rows.data_ptr(),
            rows.shape[0],
        )
        output = torch.empty(rows.shape[0], self._hidden)
        self._step(
            self._team.address,
            ctypes.addressof(self._decoder),
            ctypes.addressof(self._caches),
            ctypes.addressof(step),
            residual.data_ptr(),
            output.data_ptr(),
        )
        return output


def _described(layer: NativeLayer) -> _Layer:
    cos, sin = layer.rotary or (None, None)
    return _Layer(
        (c_void_p * _MOST_QKV_PARTS)(*(part.descriptor for part in layer.qkv)),
        layer.attention_output.descriptor,
        layer.gated.descriptor,
        layer.down.descriptor,
        layer.input_norm.data_ptr(),
        _address(layer.query_norm),
        _address(layer.key_norm),
        _address(layer.post_attention_norm),
        layer.mlp_norm.data_ptr(),
        _address(layer.post_mlp_norm),
        _address(cos),
        _address(sin),
        0 if cos is None else cos.shape[1],
        layer.window or 0,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
