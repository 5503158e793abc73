"""Adapters in the form of PEFT's LoRA (arXiv 2106.09685), merged into the weights as they are read.

A directory with adapter_config.json and adapter_model.safetensors. For each matrix W that it changes it has
A `[r, in]` and B `[out, r]`, and the model is run with W + scale * B A, where scale is alpha / r, or
alpha / sqrt(r) with `use_rslora` (arXiv 2312.03732). A merged model costs no more than its base. What changes
a model in any other way is refused, since leaving it out would be another model than was trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine_service.loaders.json_file import read_json
from engine_service.models.weights import NamedTensor
from shared.errors import ConfigError

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What else adapters can do, and the value that means that this one does not.
_NOT_MERGED: dict[str, tuple[Any, ...]] = {
    "fan_in_fan_out": (False, None),  # matrices stored the other way round, as GPT-2 has them
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
}


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    path: Path
    changes: Mapping[str, tuple[Tensor, Tensor, float]]  # A, B and the scale, by the name of the matrix

    def merged(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The tensors of the base, those that are changed in float32. Raises ConfigError at the end if one
        was not among them."""
        left = set(self.changes)
        for name, tensor in tensors:
            if name not in left:
                yield name, tensor
                continue
            left.discard(name)
            yield name, self._merge(name, tensor)
        if left:
            raise ConfigError(f"{self.path} changes {min(left)}, which the model does not have", "lora")

    def _merge(self, name: str, base: object) -> Tensor:
        a, b, scale = self.changes[name]
        if not isinstance(base, Tensor) or base.ndim != 2:
            raise ConfigError(f"{self.path} changes {name}, which is no matrix of floats", "lora")
        if a.shape[1] != base.shape[1] or b.shape[0] != base.shape[0]:
            given, wanted = (b.shape[0], a.shape[1]), tuple(base.shape)
            raise ConfigError(f"{self.path} changes {name} as if it were {given}; it is {wanted}", "lora")
        return base.to(torch.float32) + scale * (b.to(torch.float32) @ a.to(torch.float32))


def read_adapter(path: Path) -> LoraAdapter:
    """Raises ConfigError for anything that could not be merged whole."""
    config = read_json(path / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path} is an adapter of the type {config.get('peft_type')!r}, not LORA", "lora")
    for name, off in _NOT_MERGED.items():
        if config.get(name) not in off:
            raise ConfigError(f"{path} has {name} = {config[name]!r}, which is not supported", "lora")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigError(f"{path} has no number as lora_alpha", "lora")
    tensors = _read_tensors(path / "adapter_model.safetensors")
    changes = {}
    for module in _modules(tensors):
        a, b = tensors[module + _A], tensors.get(module + _B)
        if b is None or a.ndim != 2 or b.ndim != 2 or b.shape[1] != a.shape[0] or a.shape[0] == 0:
            raise ConfigError(f"{path} has no pair of matrices for {module}", "lora")
        rank = a.shape[0]  # of this matrix: a rank_pattern may give others to some
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        changes[module.removeprefix(_PREFIX) + ".weight"] = (a, b, scale)
    of_pairs = {module + end for module in _modules(tensors) for end in (_A, _B)}
    if others := sorted(set(tensors) - of_pairs):
        raise ConfigError(f"{path} has a tensor {others[0]!r}, which is not supported", "lora")
    if not changes:
        raise ConfigError(f"{path} changes nothing", "lora")
    return LoraAdapter(path, changes)


def _modules(tensors: Iterable[str]) -> list[str]:
    return [key.removesuffix(_A) for key in tensors if key.endswith(_A)]


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}", "lora") from error
    return tensors
