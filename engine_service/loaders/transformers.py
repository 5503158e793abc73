"""Models that we do not compute ourselves, loaded and run by transformers (models/transformers_module.py)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from engine_service.models.families import FAMILIES
from engine_service.models.module_check import check_module
from engine_service.models.spec import ModelSpec
from engine_service.models.transformers_module import ATTENTION_NAME, TransformersModule, attention_function
from shared.errors import ConfigError

_LOG = logging.getLogger(__name__)


def load_transformers(
    path: Path, architecture: str, dtype: torch.dtype
) -> tuple[ModelSpec, TransformersModule]:
    """Raises ConfigError, which lists our own families and says why transformers' module does not do."""
    try:
        module = _load_module(path, architecture, dtype)
        spec = check_module(module, architecture)
    # transformers' modules raise whatever their code runs into; it all means that the model cannot be run.
    except Exception as error:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; known: {', '.join(sorted(FAMILIES))}. "
            f"Running transformers' own module was tried: {_reason(error)}",
            "source",
        ) from error
    _LOG.info(
        "%s runs as transformers' module with paged attention, slower than our own models", architecture
    )
    return spec, TransformersModule(module)


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _load_module(path: Path, architecture: str, dtype: torch.dtype) -> Any:
    # Takes seconds to import; only these models need it.
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    # A table of transformers', for the whole process. The function has no state: twice does no harm.
    AttentionInterface.register(ATTENTION_NAME, attention_function)
    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None or model_class.__name__ != architecture:
        raise ValueError(f"it has no causal language model of this name for model_type {config.model_type!r}")
    if not model_class._supports_attention_backend:
        raise ValueError("it does not take attention functions of others")
    module, loading = model_class.from_pretrained(
        str(path),
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        output_loading_info=True,
    )
    absent = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if absent:
        raise ValueError(f"{len(absent)} tensors are missing or have another shape, e.g. {absent[0]!r}")
    if unread := loading["unexpected_keys"]:
        _LOG.warning("%d tensors of the checkpoint are not used, e.g. %r", len(unread), sorted(unread)[0])
    return module.eval()
