"""What changes in the prefix cache, told to whoever routes by it.

The layout is that of vLLM's `vllm/distributed/kv_events.py`: each event is an array that begins with its
type's name. A subscriber that applies all events in order knows what the engine can find in its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine_service.sequence import BlockHash, Sequence

# vLLM's word for the cache that attention reads, on whatever device, as opposed to an offloaded copy.
MEDIUM_COMPUTE = "GPU"


class KvEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(KvEvent):
    """Consecutive blocks of one prefix can be found now. `token_ids` are those of all of them, in order.

    vLLM's further field `extra_keys` is left out: it would give away the salts that keep tenants apart.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # None: the first one begins a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KvEvent):
    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(KvEvent):
    pass


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step changed."""

    ts: float  # Unix time, seconds
    events: list[Any]
    data_parallel_rank: int | None = None


class KvEventRecorder:
    """The block pool's listener: gathers the events of a step, joining what follows on each other."""

    def __init__(self, block_size: int, publish: Callable[[list[KvEvent]], None]) -> None:
        """`publish` is called by `flush`, with the events since the last one; it may keep the list."""
        self._block_size = block_size
        self._publish = publish
        self._events: list[KvEvent] = []

    def stored(self, sequence: Sequence, index: int) -> None:
        block_hash = sequence.block_hashes[index]
        parent = sequence.block_hashes[index - 1] if index else None
        token_ids = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.token_ids += token_ids
        else:
            self._events.append(
                BlockStored(
                    block_hashes=[block_hash],
                    parent_block_hash=parent,
                    token_ids=token_ids,
                    block_size=self._block_size,
                    lora_id=None,
                    medium=MEDIUM_COMPUTE,
                    lora_name=sequence.adapter or None,
                )
            )

    def removed(self, block_hash: BlockHash) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], MEDIUM_COMPUTE))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._publish(events)
