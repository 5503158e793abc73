"""The C++ operators, called through ctypes (which releases the GIL while they run)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.build import built_library
from kernels.cpu.paged_cache import PagedCache
from kernels.cpu.team import Team, loaded_library
from kernels.reference import ReferenceOperators

_SIGNATURES = {
    "headrace_rms_norm": "ppipippiif",
    "headrace_rotary": "ppiipiipppiii",
    "headrace_silu_and_mul": "ppipii",
    "headrace_gelu_tanh_and_mul": "ppipii",
    "headrace_write_kv": "pipippi",
    "headrace_paged_attention": "ppippppp" + "inn" + "nff",
}
_CTYPES = {"p": c_void_p, "i": c_int64, "n": c_int, "f": c_float}


class CpuOperators:
    """Contracts: `kernels.operators.Operators`. float32 in C++; other types go to the reference.

    Raises BackEndUnavailable where there is no compiler or it fails.
    """

    name = "cpu"

    def __init__(self, num_threads: int = 1, *, instruction_set: str | None = None) -> None:
        """`instruction_set`: as for `kernels.cpu.build.built_library`."""
        self._reference = ReferenceOperators()
        library = loaded_library(built_library(instruction_set))
        self.team = Team(num_threads, library=library)
        """Of all that computes for the same model: it is idle while another part of a step runs."""
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_CTYPES[letter] for letter in signature]
            function.restype = None
        self._rms_norm = library.headrace_rms_norm
        self._rotary = library.headrace_rotary
        self._silu_and_mul = library.headrace_silu_and_mul
        self._gelu_tanh_and_mul = library.headrace_gelu_tanh_and_mul
        self._write_kv = library.headrace_write_kv
        self._paged_attention = library.headrace_paged_attention

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return self._reference.rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return self._reference.add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        output = torch.empty(rows, width)
        self._rms_norm(
            self.team.address,
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            weight.data_ptr(),
            output.data_ptr(),
            rows,
            width,
            eps,
        )
        return output

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        if query.dtype != torch.float32:
            return self._reference.rotary(query, key, positions, cos, sin)
        num_tokens, num_heads, head_dim = query.shape
        self._rotary(
            self.team.address,
            query.data_ptr(),
            query.stride(0),
            num_heads,
            key.data_ptr(),
            key.stride(0),
            key.shape[1],
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            head_dim,
            cos.shape[1],
        )
        return None

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype != torch.float32:
            return self._reference.silu_and_mul(gate_up)
        return self._gated(self._silu_and_mul, gate_up)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype != torch.float32:
            return self._reference.gelu_tanh_and_mul(gate_up)
        return self._gated(self._gelu_tanh_and_mul, gate_up)

    def _gated(self, function: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows, double_width = gate_up.shape
        output = torch.empty(rows, double_width // 2)
        function(
            self.team.address,
            gate_up.data_ptr(),
            gate_up.stride(0),
            output.data_ptr(),
            rows,
            double_width // 2,
        )
        return output

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if key.dtype != torch.float32 or not PagedCache.takes(key_cache):
            return self._reference.write_kv(key, value, key_cache, value_cache, slot_mapping)
        self._write_kv(
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            ctypes.byref(PagedCache.of(key_cache, value_cache)),
            slot_mapping.data_ptr(),
            key.shape[0],
        )
        return None

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if query.dtype != torch.float32 or not PagedCache.takes(key_cache):
            return self._reference.paged_attention(
                query, key_cache, value_cache, metadata, scale, window=window, softcap=softcap
            )
        num_tokens, num_heads, head_dim = query.shape
        output = torch.empty(num_tokens, num_heads, head_dim)
        self._paged_attention(
            self.team.address,
            query.data_ptr(),
            query.stride(0),
            ctypes.byref(PagedCache.of(key_cache, value_cache)),
            output.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.context_lens.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.block_tables.shape[1],
            metadata.num_seqs,
            num_heads,
            window or 0,
            scale,
            softcap or 0.0,
        )
        return output
