"""Collects a checkpoint's tensors into the fused form that the decoder multiplies with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine_service.models.spec import DecoderSpec, LayerSpec
from engine_service.models.weight_form import Matrix, StoredMatrix, WeightForm
from kernels.cpu.weight_memory import new_memory
from kernels.quantized_reference import QuantizedWeight
from shared.errors import ConfigError

NamedTensor = tuple[str, StoredMatrix]  # under the names of Hugging Face's LlamaForCausalLM

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Tensor  # [num_experts, hidden]
    gate_up: Tensor  # [num_experts, 2 * intermediate, hidden]
    down: Tensor  # [num_experts, hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are `[out, in]`. Fused ones stack their parts along `out`: q, k, v and gate, up.

    What a layer does not have is None. A layer has either `gate_up` and `down` or `experts`.
    """

    input_norm: Tensor  # [hidden]
    qkv: Matrix  # [query_width + 2 * kv_width, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_output: Matrix  # [hidden, query_width]
    attention_output_bias: Tensor | None
    post_attention_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Matrix | None  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Matrix | None  # [hidden, intermediate]
    down_bias: Tensor | None
    experts: ExpertWeights | None
    post_mlp_norm: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Matrix  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Matrix  # [vocab, hidden]; the embedding itself when tied

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed: packed matrices multiply float32."""
        return self.embedding.dtype if isinstance(self.embedding, Tensor) else torch.float32

    def to(self, device: torch.device) -> DecoderWeights:
        """These weights on `device`; themselves if they are there already."""
        if self.device == device:
            return self
        assert isinstance(self.embedding, Tensor), "packed weights stay on the CPU"
        assert isinstance(self.head, Tensor), "packed weights stay on the CPU"
        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        layers = tuple(_moved(layer, device) for layer in self.layers)
        return DecoderWeights(embedding=embedding, layers=layers, norm=self.norm.to(device), head=head)

    @property
    def num_bytes(self) -> int:
        heads = [] if self.head is self.embedding else [self.head]
        return sum(each.nbytes for each in (self.embedding, self.norm, *heads, *_tensors(self.layers)))


def _moved(weights: W, device: torch.device) -> W:
    changes: dict[str, Any] = {}
    for name, value in _present(weights):
        changes[name] = value.to(device) if isinstance(value, Tensor) else _moved(value, device)
    return replace(weights, **changes)  # type: ignore[type-var]


def _tensors(parts: Iterable[Any]) -> Iterator[Matrix]:
    for part in parts:
        if isinstance(part, Matrix):
            yield part
        else:
            yield from _tensors(value for _, value in _present(part))


def _present(weights: object) -> list[tuple[str, Any]]:
    assert is_dataclass(weights), "weights are tensors and dataclasses of them"
    values = [(field.name, getattr(weights, field.name)) for field in fields(weights)]
    return [(name, value) for name, value in values if value is not None]


# -------------------------------------------------------------------------- collecting


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the rows of a checkpoint tensor go: `target[first_row : first_row + shape[0]]`."""

    target: str
    first_row: int
    shape: tuple[int, ...]
    num_target_rows: int


_FLOAT_MATRICES = ("router", "experts_gate_up", "experts_down")
"""Targets whose matrices are not multiplied by `Linears`."""


def collect_weights(spec: DecoderSpec, tensors: Iterable[NamedTensor], form: WeightForm) -> DecoderWeights:
    """Consumes the tensors one at a time; each matrix takes its form when its last part has come.

    Norm weights that have an offset stay in float32, as they are computed: near 1, a half-precision
    number is too coarse for what they hold. Raises ConfigError for a tensor that is unknown, missing or of
    the wrong shape: a weight that is silently left out gives a model that talks nonsense.
    """
    slots = _slots(spec)
    targets: dict[str, _Target] = {}
    finished: dict[str, Matrix] = {}
    missing = set(slots)
    for name, tensor in _unfused(spec, tensors):
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
        if name not in missing:
            raise ConfigError(f"tensor {name!r} is there twice", "source")
        missing.discard(name)
        has_offset = spec.norm_offset != 0 and slot.target.endswith("norm")
        if has_offset:
            assert isinstance(tensor, Tensor), "a norm is no matrix"
            tensor = tensor.float() + spec.norm_offset
        if slot.target not in targets:
            targets[slot.target] = _Target(slot, form, torch.float32 if has_offset else form.dtype)
        if targets[slot.target].is_complete_with(slot, tensor):
            finished[slot.target] = targets.pop(slot.target).finished()
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors are missing from the weights, e.g. {sorted(missing)[0]!r}", "source"
        )
    return _assemble(spec, finished)


class _Target:
    """A fused tensor while its parts come in: floats go to their rows at once, blocks wait for each other."""

    def __init__(self, slot: _Slot, form: WeightForm, dtype: torch.dtype) -> None:
        self._name = slot.target
        self._form = form
        self._is_matrix = len(slot.shape) == 2 and not slot.target.endswith(_FLOAT_MATRICES)
        self._shape = (slot.num_target_rows, *slot.shape[1:])
        self._dtype = dtype
        self._num_missing_rows = slot.num_target_rows
        self._floats: Tensor | None = None
        self._blocks: dict[int, QuantizedWeight] = {}  # by first row

    def is_complete_with(self, slot: _Slot, part: StoredMatrix) -> bool:
        self._num_missing_rows -= slot.shape[0]
        if isinstance(part, QuantizedWeight) and self._is_matrix and self._form.keeps_blocks:
            self._blocks[slot.first_row] = part
        else:
            self._write(slot.first_row, part)
        return self._num_missing_rows == 0

    def finished(self) -> Matrix:
        if not self._is_matrix:
            assert self._floats is not None, "only matrices wait for each other"
            return self._floats
        return self._form.matrix(self._name, list(self._parts()), is_gated=self._name.endswith("gate_up"))

    def _parts(self) -> Iterator[StoredMatrix]:
        """From the first row to the last; all floats between two blocks are one part."""
        next_row = 0
        for first_row, block in sorted(self._blocks.items(), key=lambda item: item[0]):
            if next_row < first_row:
                yield self._float_rows(next_row, first_row)
            yield block
            next_row = first_row + block.num_outputs
        if next_row < self._shape[0]:
            yield self._float_rows(next_row, self._shape[0])

    def _float_rows(self, begin: int, end: int) -> Tensor:
        assert self._floats is not None, "what did not come as blocks has come as floats"
        return self._floats[begin:end]

    def _write(self, first_row: int, part: StoredMatrix) -> None:
        if self._floats is None:
            self._floats = _empty(self._shape, self._dtype)
        values = part if isinstance(part, Tensor) else part.dequantized()
        self._floats[first_row : first_row + part.shape[0]].copy_(values)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if len(shape) == 1:
        return torch.empty(shape, dtype=dtype)
    return new_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _unfused(spec: DecoderSpec, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Takes apart what some checkpoints store in one piece (Phi-3's), into views of it."""
    parts_of = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), (spec.query_width, spec.kv_width, spec.kv_width)),
        "gate_up_proj": (("gate_proj", "up_proj"), (spec.intermediate_size, spec.intermediate_size)),
    }
    for name, tensor in tensors:
        stem, _, suffix = name.rpartition(".")
        parent, _, last = stem.rpartition(".")
        names, widths = parts_of.get(last, ((), ()))
        if not names or tensor.shape[0] != sum(widths):
            yield name, tensor
            continue
        for part, piece in zip(names, tensor.split(list(widths)), strict=True):
            yield f"{parent}.{part}.{suffix}", piece


def _assemble(spec: DecoderSpec, finished: dict[str, Any]) -> DecoderWeights:
    def layer(index: int) -> LayerWeights:
        own = {field.name: finished.get(f"{index}.{field.name}") for field in fields(LayerWeights)}
        return LayerWeights(**(own | {"experts": _experts(spec, index, finished)}))  # type: ignore[arg-type]

    embedding = finished["embedding"]
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(spec.num_layers)),
        norm=finished["norm"],
        head=embedding if spec.has_tied_head else finished["head"],
    )


def _experts(spec: DecoderSpec, index: int, finished: dict[str, Any]) -> ExpertWeights | None:
    experts = spec.layers[index].experts
    if experts is None:
        return None
    return ExpertWeights(
        router=finished[f"{index}.router"],
        gate_up=finished[f"{index}.experts_gate_up"].view(experts.num_experts, -1, spec.hidden_size),
        down=finished[f"{index}.experts_down"].view(experts.num_experts, spec.hidden_size, -1),
    )


def _whole(target: str, *shape: int) -> _Slot:
    return _Slot(target, 0, shape, shape[0])


def _slots(spec: DecoderSpec) -> dict[str, _Slot]:
    slots = {
        "model.embed_tokens.weight": _whole("embedding", spec.vocab_size, spec.hidden_size),
        "model.norm.weight": _whole("norm", spec.hidden_size),
    }
    if not spec.has_tied_head:
        slots["lm_head.weight"] = _whole("head", spec.vocab_size, spec.hidden_size)
    for index, layer in enumerate(spec.layers):
        slots |= _attention_slots(spec, index)
        slots |= _mlp_slots(spec, index) if layer.experts is None else _expert_slots(spec, index, layer)
        slots |= _norm_slots(spec, index)
    return slots


def _attention_slots(spec: DecoderSpec, i: int) -> dict[str, _Slot]:
    hidden, query, kv = spec.hidden_size, spec.query_width, spec.kv_width
    fused = query + 2 * kv
    attention = f"model.layers.{i}.self_attn"
    slots = {f"{attention}.o_proj.weight": _whole(f"{i}.attention_output", hidden, query)}
    for part, first_row, rows in (("q", 0, query), ("k", query, kv), ("v", query + kv, kv)):
        slots[f"{attention}.{part}_proj.weight"] = _Slot(f"{i}.qkv", first_row, (rows, hidden), fused)
        if spec.has_qkv_bias:
            slots[f"{attention}.{part}_proj.bias"] = _Slot(f"{i}.qkv_bias", first_row, (rows,), fused)
    if spec.has_output_bias:
        slots[f"{attention}.o_proj.bias"] = _whole(f"{i}.attention_output_bias", hidden)
    if spec.has_query_key_norm:
        slots[f"{attention}.q_norm.weight"] = _whole(f"{i}.query_norm", spec.head_dim)
        slots[f"{attention}.k_norm.weight"] = _whole(f"{i}.key_norm", spec.head_dim)
    return slots


def _mlp_slots(spec: DecoderSpec, i: int) -> dict[str, _Slot]:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    mlp = f"model.layers.{i}.mlp"
    slots = {f"{mlp}.down_proj.weight": _whole(f"{i}.down", hidden, inter)}
    for part, first_row in (("gate", 0), ("up", inter)):
        slots[f"{mlp}.{part}_proj.weight"] = _Slot(f"{i}.gate_up", first_row, (inter, hidden), 2 * inter)
        if spec.has_mlp_bias:
            slots[f"{mlp}.{part}_proj.bias"] = _Slot(f"{i}.gate_up_bias", first_row, (inter,), 2 * inter)
    if spec.has_mlp_bias:
        slots[f"{mlp}.down_proj.bias"] = _whole(f"{i}.down_bias", hidden)
    return slots


def _expert_slots(spec: DecoderSpec, i: int, layer: LayerSpec) -> dict[str, _Slot]:
    assert layer.experts is not None, "only layers with experts have slots for them"
    count, inter, hidden = layer.experts.num_experts, layer.experts.intermediate_size, spec.hidden_size
    mlp = f"model.layers.{i}.mlp"
    slots = {f"{mlp}.gate.weight": _whole(f"{i}.router", count, hidden)}
    for expert in range(count):
        name, first_row = f"{mlp}.experts.{expert}", expert * 2 * inter
        rows, total = (inter, hidden), count * 2 * inter
        slots |= {
            f"{name}.gate_proj.weight": _Slot(f"{i}.experts_gate_up", first_row, rows, total),
            f"{name}.up_proj.weight": _Slot(f"{i}.experts_gate_up", first_row + inter, rows, total),
            f"{name}.down_proj.weight": _Slot(
                f"{i}.experts_down", expert * hidden, (hidden, inter), count * hidden
            ),
        }
    return slots


def _norm_slots(spec: DecoderSpec, i: int) -> dict[str, _Slot]:
    layer = f"model.layers.{i}"
    # With norms on both sides, Hugging Face's name of Llama's second norm means the attention's result.
    after_attention = "post_attention_norm" if spec.has_post_norms else "mlp_norm"
    targets = {"input_layernorm": "input_norm", "post_attention_layernorm": after_attention}
    if spec.has_post_norms:
        targets |= {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "post_mlp_norm"}
    return {
        f"{layer}.{name}.weight": _whole(f"{i}.{target}", spec.hidden_size)
        for name, target in targets.items()
    }
