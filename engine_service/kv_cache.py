"""The tensors that hold keys and values, and how many blocks of them a memory budget gives."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_service.free_memory import free_memory_bytes
from engine_service.models.spec import ModelSpec
from engine_service.sequence import BlockCopy
from kernels.kv_vectors import stored_width
from shared.config import ModelConfig
from shared.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer, keys and values `[num_blocks, num_kv_heads, block_size, width]` (kernels/kv_vectors.py).

    The block pool decides which sequence owns which block; this only holds the memory.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    num_blocks: int
    block_size: int


def copy_blocks(cache: KVCache, copies: Sequence[BlockCopy]) -> None:
    """Makes the copies in their order, in all layers."""
    for copy in copies:
        for tensor in itertools.chain(cache.keys, cache.values):
            tensor[copy.target] = tensor[copy.source]


def resolve_kv_cache_dtype(config: ModelConfig) -> torch.dtype:
    """What `kv_cache_dtype` means for this model."""
    name: str = config.kv_cache_dtype
    if name == "auto":
        # Half the memory of float32 and nearly twice the speed of reading it; what it costs: docs/MODELS.md.
        is_cpu_float = config.device == "cpu" and config.dtype == "float32"
        name = "float16" if is_cpu_float else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `block_size` tokens in all layers."""
    vector_bytes = stored_width(spec.head_dim, dtype) * dtype.itemsize
    return 2 * spec.num_layers * spec.num_kv_heads * block_size * vector_bytes


def plan_num_blocks(config: ModelConfig, spec: ModelSpec, max_model_len: int, free_bytes: int) -> int:
    """Blocks that the configured budget gives, never more than all sequences at full length could fill.

    Raises ConfigError if not even one request of max_model_len fits.
    """
    blocks_per_request = -(-max_model_len // config.block_size)
    block_bytes = bytes_per_block(spec, config.block_size, resolve_kv_cache_dtype(config))
    if config.num_gpu_blocks_override is not None:
        num_blocks, field = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    else:
        if config.kv_cache_memory_bytes is not None:
            budget, field = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        else:
            budget, field = int(free_bytes * config.gpu_memory_utilization), "gpu_memory_utilization"
        num_blocks = min(budget // block_bytes, blocks_per_request * config.max_num_seqs)
    if num_blocks < blocks_per_request:
        need_mib = blocks_per_request * block_bytes / 2**20
        raise ConfigError(
            f"the KV cache of model {config.name!r} has {num_blocks} blocks, but one request of "
            f"max_model_len={max_model_len} tokens needs {blocks_per_request} ({need_mib:.0f} MiB): "
            f"raise {field} or lower max_model_len",
            field,
        )
    return num_blocks


def allocate_kv_cache(
    config: ModelConfig, spec: ModelSpec, max_model_len: int, device: torch.device
) -> KVCache:
    """Sizes the cache for the memory free now, allocates it and logs the result."""
    num_blocks = plan_num_blocks(config, spec, max_model_len, free_memory_bytes(device))
    dtype = resolve_kv_cache_dtype(config)
    shape = (num_blocks, spec.num_kv_heads, config.block_size, stored_width(spec.head_dim, dtype))

    def tensors() -> tuple[Tensor, ...]:
        # Not zeroed: no operator reads a slot before it was written, and on a CPU an untouched page
        # costs no memory.
        return tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.num_layers))

    _LOG.info(
        "KV cache in %s: %d blocks = %d tokens; %d requests of full length",
        str(dtype).removeprefix("torch."),
        num_blocks,
        num_blocks * config.block_size,
        num_blocks // -(-max_model_len // config.block_size),
    )
    return KVCache(keys=tensors(), values=tensors(), num_blocks=num_blocks, block_size=config.block_size)
