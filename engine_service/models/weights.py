"""Collects a checkpoint's tensors into the fused form that the decoder multiplies with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine_service.models.spec import ModelSpec
from shared.errors import ConfigError

NamedTensor = tuple[str, Tensor]  # under the names of Hugging Face's LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are `[out, in]`. Fused ones stack their parts along `out`: q, k, v and gate, up."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [query_width + 2 * kv_width, hidden]
    qkv_bias: Tensor | None
    attention_output: Tensor  # [hidden, query_width]
    attention_output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself when tied

    def to(self, device: torch.device) -> LlamaWeights:
        """These weights on `device`; themselves if they are there already."""
        if self.embedding.device == device:
            return self

        def moved(layer: LayerWeights) -> LayerWeights:
            by_name = {field.name: getattr(layer, field.name) for field in fields(layer)}
            present = {name: tensor for name, tensor in by_name.items() if tensor is not None}
            return replace(layer, **{name: tensor.to(device) for name, tensor in present.items()})

        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        layers = tuple(moved(layer) for layer in self.layers)
        return LlamaWeights(embedding=embedding, layers=layers, norm=self.norm.to(device), head=head)

    @property
    def num_bytes(self) -> int:
        tensors = [self.embedding, self.norm]
        for layer in self.layers:
            tensors += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
        if self.head is not self.embedding:
            tensors.append(self.head)
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the rows of a checkpoint tensor go: `target[first_row : first_row + num_rows]`."""

    target: str
    first_row: int
    shape: tuple[int, ...]
    num_target_rows: int


def collect_llama_weights(
    spec: ModelSpec, tensors: Iterable[NamedTensor], dtype: torch.dtype
) -> LlamaWeights:
    """Consumes the tensors one at a time, so that at most one lies beside its copy in memory.

    Raises ConfigError for a tensor that is unknown, missing or of the wrong shape: a weight that is
    silently left out gives a model that talks nonsense.
    """
    slots = _slots(spec)
    buffers: dict[str, Tensor] = {}
    missing = {name for name in slots if not name.endswith(".bias")}
    for name, tensor in tensors:
        if name == "lm_head.weight" and spec.has_tied_head:
            continue
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints store this table; we compute it
            continue
        slot = slots.get(name)
        if slot is None:
            raise ConfigError(f"unexpected tensor {name!r} for architecture {spec.architecture}", "source")
        if tuple(tensor.shape) != slot.shape:
            raise ConfigError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's shape asks for {slot.shape}",
                "source",
            )
        if slot.target not in buffers:
            buffers[slot.target] = torch.zeros(slot.num_target_rows, *slot.shape[1:], dtype=dtype)
        buffers[slot.target][slot.first_row : slot.first_row + slot.shape[0]].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors are missing from the weights, e.g. {sorted(missing)[0]!r}", "source"
        )
    return _assemble(spec, buffers)


def _assemble(spec: ModelSpec, buffers: dict[str, Tensor]) -> LlamaWeights:
    layers = tuple(
        LayerWeights(
            input_norm=buffers[f"{index}.input_norm"],
            qkv=buffers[f"{index}.qkv"],
            qkv_bias=buffers.get(f"{index}.qkv_bias"),
            attention_output=buffers[f"{index}.attention_output"],
            attention_output_bias=buffers.get(f"{index}.attention_output_bias"),
            mlp_norm=buffers[f"{index}.mlp_norm"],
            gate_up=buffers[f"{index}.gate_up"],
            down=buffers[f"{index}.down"],
        )
        for index in range(spec.num_layers)
    )
    embedding = buffers["embedding"]
    head = embedding if spec.has_tied_head else buffers["head"]
    return LlamaWeights(embedding=embedding, layers=layers, norm=buffers["norm"], head=head)


def _slots(spec: ModelSpec) -> dict[str, _Slot]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    query, kv = spec.query_width, spec.kv_width
    fused = query + 2 * kv

    def whole(target: str, *shape: int) -> _Slot:
        return _Slot(target, 0, shape, shape[0])

    slots = {
        "model.embed_tokens.weight": whole("embedding", spec.vocab_size, hidden),
        "model.norm.weight": whole("norm", hidden),
    }
    if not spec.has_tied_head:
        slots["lm_head.weight"] = whole("head", spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        slots |= {
            f"{layer}.input_layernorm.weight": whole(f"{i}.input_norm", hidden),
            f"{layer}.self_attn.q_proj.weight": _Slot(f"{i}.qkv", 0, (query, hidden), fused),
            f"{layer}.self_attn.k_proj.weight": _Slot(f"{i}.qkv", query, (kv, hidden), fused),
            f"{layer}.self_attn.v_proj.weight": _Slot(f"{i}.qkv", query + kv, (kv, hidden), fused),
            f"{layer}.self_attn.q_proj.bias": _Slot(f"{i}.qkv_bias", 0, (query,), fused),
            f"{layer}.self_attn.k_proj.bias": _Slot(f"{i}.qkv_bias", query, (kv,), fused),
            f"{layer}.self_attn.v_proj.bias": _Slot(f"{i}.qkv_bias", query + kv, (kv,), fused),
            f"{layer}.self_attn.o_proj.weight": whole(f"{i}.attention_output", hidden, query),
            f"{layer}.self_attn.o_proj.bias": whole(f"{i}.attention_output_bias", hidden),
            f"{layer}.post_attention_layernorm.weight": whole(f"{i}.mlp_norm", hidden),
            f"{layer}.mlp.gate_proj.weight": _Slot(f"{i}.gate_up", 0, (inter, hidden), 2 * inter),
            f"{layer}.mlp.up_proj.weight": _Slot(f"{i}.gate_up", inter, (inter, hidden), 2 * inter),
            f"{layer}.mlp.down_proj.weight": whole(f"{i}.down", hidden, inter),
        }
    return slots
