"""Any other decoder: transformers' own module, with our paged attention in the place of its attention.

transformers lets a function be registered as an attention implementation, and hands keyword arguments of the
model's call on to it. Ours gets the step that way, so no state stands outside of a call. Only modules that
say that they support such functions are taken, and each is compared with itself under transformers' own
attention before it serves (module_check.py): a difference is an error of loading, not nonsense later.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_service.kv_cache import KVCache
from kernels.attention_metadata import AttentionMetadata
from kernels.operators import Operators

ATTENTION_NAME = "headrace_paged"  # in transformers' table of attention functions
MAX_LOGIT_ROWS = 512  # of one pass, if several are allowed: 100 MB with 49k tokens


@dataclass(frozen=True, slots=True)
class TransformersModule:
    """A `PreTrainedModel` that has passed `check_module`."""

    module: Any

    def to(self, device: torch.device) -> TransformersModule:
        """In place: runners of one process that share these weights run on one device."""
        self.module.to(device)
        return self

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.module.parameters())


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks for. query `[num_tokens, num_heads, head_dim]`, key and value with KV heads."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None


class Step(Protocol):
    """Goes through the module's call as a keyword argument, to each of its layers."""

    def attend(self, call: AttentionCall) -> Tensor:
        """A contiguous tensor of the query's shape."""


class UnsupportedAttention(ValueError):  # noqa: N818 - reads as the thing that is raised
    """A layer asks for attention that we do not compute; the message says which."""


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """With the signature of transformers' attention functions: `[1, heads, num_tokens, head_dim]` each."""
    step: Step | None = others.get("headrace_step")
    if step is None:
        raise UnsupportedAttention("the module does not hand keyword arguments on to its attention")
    for name in ("s_aux", "position_bias"):
        if others.get(name) is not None:
            raise UnsupportedAttention(f"attention with {name}")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttention("attention that is not causal")
    if query.shape[0] != 1 or key.shape != value.shape:
        raise UnsupportedAttention("values of another shape than keys")
    flat_query, flat_key, flat_value = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(module.layer_idx, flat_query, flat_key, flat_value, scale, sliding_window, softcap)
    return step.attend(call).unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention over the cache, by our operators."""

    operators: Operators
    kv_cache: KVCache
    metadata: AttentionMetadata

    def attend(self, call: AttentionCall) -> Tensor:
        keys, values = self.kv_cache.keys[call.layer], self.kv_cache.values[call.layer]
        self.operators.write_kv(call.key, call.value, keys, values, self.metadata.slot_mapping)
        return self.operators.paged_attention(
            call.query, keys, values, self.metadata, call.scale, window=call.window, softcap=call.softcap
        )


class TransformersModel:
    """The `engine_service.models.registry.Model` of a transformers module. Stateless."""

    def __init__(self, weights: TransformersModule, operators: Operators) -> None:
        self._module = weights.module
        self._operators = operators

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        step = PagedStep(self._operators, kv_cache, metadata)
        return compute_logits(self._module, token_ids, positions, step, logit_rows)

    def forward_in_parts(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        parts: SequenceOf[Tensor],
    ) -> Iterator[Tensor]:
        """Not all modules let the output projection be called by itself, so what does not fit into one pass
        takes another, which writes the same keys and values again."""
        for group in _groups(parts):
            logits = self.forward(token_ids, positions, kv_cache, metadata, torch.cat(group))
            yield from torch.split(logits, [len(part) for part in group])


def _groups(parts: SequenceOf[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours with MAX_LOGIT_ROWS rows together; a part with more is by itself."""
    group: list[Tensor] = []
    for part in parts:
        if group and sum(map(len, group)) + len(part) > MAX_LOGIT_ROWS:
            yield group
            group = []
        group.append(part)
    yield group


def compute_logits(module: Any, token_ids: Tensor, positions: Tensor, step: Step, rows: Tensor) -> Tensor:
    """Float32 `[num_rows, vocab]`. token_ids and positions are flat, of all sequences of the step."""
    output = module(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=rows,
        headrace_step=step,
    )
    logits: Tensor = output.logits[0]
    return logits.float()
