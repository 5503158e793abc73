"""Finds out by trial what a transformers module needs, and if our attention leaves its results the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine_service.kv_cache import KVCache
from engine_service.models.spec import ModelSpec
from engine_service.models.transformers_module import (
    ATTENTION_NAME,
    AttentionCall,
    PagedStep,
    UnsupportedAttention,
    compute_logits,
)
from kernels.attention_metadata import AttentionMetadata
from kernels.reference import ReferenceOperators

_BLOCK_SIZE = 4
_PROMPT_LENS = (9, 6)
_STEPS = ((5, 3), (1, 3), (3, 0))  # tokens of each prompt, step by step
_TOLERANCE = {torch.float32: 1e-3}  # of the range of the logits
_HALF_TOLERANCE = 0.05


@dataclass(slots=True)
class _Recorder:
    """A step that computes nothing and remembers what was asked for."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return torch.zeros_like(call.query)


@torch.inference_mode()
def check_module(module: Any, architecture: str) -> ModelSpec:
    """Raises ValueError with the reason if the module must not be run with paged attention.

    Two short prompts run in one batch, chunk by chunk, as an engine does it, and alone, as transformers does.
    """
    config = module.config
    recorder = _Recorder()
    token_ids, positions = torch.tensor([1, 2]), torch.tensor([0, 1])
    compute_logits(module, token_ids, positions, recorder, positions)
    shapes = {(call.key.shape[1], call.key.shape[2]) for call in recorder.calls}
    num_layers = int(config.num_hidden_layers)
    if [call.layer for call in recorder.calls] != list(range(num_layers)) or len(shapes) != 1:
        raise UnsupportedAttention(
            f"{len(recorder.calls)} attention calls with {len(shapes)} shapes of keys in {num_layers} layers"
        )
    _check_windows(config, [call.window for call in recorder.calls])
    ((num_kv_heads, head_dim),) = shapes
    context_len = _context_len(config)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len,
        extended_context_len=context_len,
    )
    _compare(module, spec)
    return spec


def _check_windows(config: Any, windows: list[int | None]) -> None:
    """A window that only transformers' masks know would be lost, and no short prompt shows it."""
    types = getattr(config, "layer_types", None)
    if types:
        if unknown := set(types) - {"full_attention", "sliding_attention"}:
            raise UnsupportedAttention(f"layers of type {', '.join(sorted(unknown))}")
        slides = [kind == "sliding_attention" for kind in types]
    else:
        is_set = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        slides = [bool(is_set)] * len(windows)
    if slides != [window is not None for window in windows]:
        raise UnsupportedAttention("its layers do not tell the attention of their sliding window")


def _context_len(config: Any) -> int:
    """Within it, no rotary scaling depends on the length of the text (models/rotary.py says why)."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    originals = [
        one["original_max_position_embeddings"] for one in each if one.get("rope_type") == "longrope"
    ]
    return int(min([config.max_position_embeddings, *originals]))


def _compare(module: Any, spec: ModelSpec) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(spec.vocab_size, (length,), generator=generator) for length in _PROMPT_LENS]
    ours = _paged_logits(module, spec, prompts)
    module.set_attn_implementation("eager")
    try:
        theirs = [module(input_ids=prompt.unsqueeze(0)).logits[0].float() for prompt in prompts]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    expected = torch.cat(theirs)
    error = (ours - expected).abs().max() / (expected.max() - expected.min())
    if not error < _TOLERANCE.get(module.dtype, _HALF_TOLERANCE):  # so that NaN is refused, too
        raise UnsupportedAttention(
            f"with paged attention its logits change by {float(error):.1%} of their range"
        )


def _paged_logits(module: Any, spec: ModelSpec, prompts: list[Tensor]) -> Tensor:
    """Of all tokens of both prompts, one after the other."""
    num_blocks = [-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts]
    shape = (sum(num_blocks), spec.num_kv_heads, _BLOCK_SIZE, spec.head_dim)
    cache = KVCache(
        keys=tuple(torch.zeros(shape, dtype=module.dtype) for _ in range(spec.num_layers)),
        values=tuple(torch.zeros(shape, dtype=module.dtype) for _ in range(spec.num_layers)),
        num_blocks=shape[0],
        block_size=_BLOCK_SIZE,
    )
    tables = torch.split(torch.arange(sum(num_blocks), dtype=torch.int32), num_blocks)
    done = [0] * len(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for counts in _STEPS:
        rows = [index for index, count in enumerate(counts) if count]
        positions = [torch.arange(done[i], done[i] + counts[i]) for i in rows]
        contexts = [done[i] + counts[i] for i in rows]
        slots = [
            tables[i].long()[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE
            for i, p in zip(rows, positions, strict=True)
        ]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(counts[i] for i in rows)], dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.nn.utils.rnn.pad_sequence([tables[i] for i in rows], batch_first=True),
            slot_mapping=torch.cat(slots),
            max_query_len=max(counts),
            max_context_len=max(contexts),
        )
        tokens = torch.cat([prompts[i][p] for i, p in zip(rows, positions, strict=True)])
        step = PagedStep(ReferenceOperators(), cache, metadata)
        logits = compute_logits(module, tokens, torch.cat(positions), step, torch.arange(len(tokens)))
        for i, part in zip(rows, torch.split(logits, [counts[i] for i in rows]), strict=True):
            found[i].append(part)
            done[i] += counts[i]
    return torch.cat([torch.cat(parts) for parts in found])
