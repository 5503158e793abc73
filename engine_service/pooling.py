"""From the hidden states of a text's tokens to one vector."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engine_service.loaders.json_file import read_json, read_json_list
from shared.config import Pooling
from shared.errors import ConfigError

_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}


def declared_pooling(path: Path) -> Pooling | None:
    """What a model directory says in the files of sentence-transformers; None if it has none.

    Raises ConfigError if it says something that we do not compute.
    """
    if not (path / "modules.json").is_file():
        return None
    kinds = {
        str(module["type"]).rpartition(".")[2]: module for module in read_json_list(path / "modules.json")
    }
    if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise ConfigError(f"{path}: modules of type {', '.join(sorted(unknown))} are not supported", "source")
    if "Pooling" not in kinds:
        return None
    settings = read_json(path / str(kinds["Pooling"]["path"]) / "config.json")
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _FLAGS:
        raise ConfigError(
            f"{path}: pooling {', '.join(modes)} is not supported; known: {', '.join(_FLAGS)}", "source"
        )
    return _FLAGS[modes[0]]


def wanted_rows(pooling: Pooling, lengths: list[int]) -> Tensor:
    """Which rows of a flat batch `pool` reads: int64."""
    ends = torch.tensor(lengths).cumsum(0)
    if pooling == "last":
        return ends - 1
    if pooling == "cls":
        return ends - torch.tensor(lengths)
    return torch.arange(sum(lengths))


def pool(pooling: Pooling, rows: Tensor, lengths: list[int], *, normalises: bool) -> Tensor:
    """rows: `[num_wanted, dim]`, those of `wanted_rows`. Returns float32 `[len(lengths), dim]`."""
    vectors = rows.float()
    if pooling == "mean":
        vectors = torch.stack([part.mean(0) for part in torch.split(vectors, lengths)])
    return normalize(vectors, dim=-1) if normalises else vectors
