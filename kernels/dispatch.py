"""Chooses a back end by name. Back ends are imported only when chosen: triton is slow to load."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch

from kernels.operators import Operators

_LOG = logging.getLogger(__name__)

# name -> (module, class). A class is built with the number of threads it may use.
BACK_ENDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "reference": ("kernels.reference", "ReferenceOperators"),
        "cpu": ("kernels.cpu.operators", "CpuOperators"),
        "triton": ("kernels.triton.operators", "TritonOperators"),
    }
)


_ADVICE = MappingProxyType(
    {"cpu": " (for the fast ones a compiler of C++20 is needed, such as g++ 11: as `c++`, or named by CXX)"}
)


class BackEndUnavailable(RuntimeError):  # noqa: N818 - reads as the thing that is raised
    """A back end cannot run on this machine; the message says what is missing."""


def select_operators(name: str | None, device: torch.device | str, *, num_threads: int = 1) -> Operators:
    """The operators of the back end `name`, or, for None, of the fastest one for `device`.

    Only a choice made here (None) falls back to the reference, with one warning, where the fast back
    end cannot run; a back end that was asked for by name raises BackEndUnavailable instead. Raises
    ValueError for an unknown name.
    """
    if name is not None:
        return _build(name, num_threads)
    preferred = "triton" if torch.device(device).type == "cuda" else "cpu"
    try:
        return _build(preferred, num_threads)
    except BackEndUnavailable as error:
        _LOG.warning("%s; running the slower reference operators%s", error, _ADVICE.get(preferred, ""))
        return _build("reference", num_threads)


def _build(name: str, num_threads: int) -> Operators:
    if name not in BACK_ENDS:
        raise ValueError(f"no kernel back end is named {name!r}; known: {', '.join(sorted(BACK_ENDS))}")
    module, class_name = BACK_ENDS[name]
    back_end = getattr(importlib.import_module(module), class_name)
    return cast("Operators", back_end() if name == "reference" else back_end(num_threads=num_threads))
