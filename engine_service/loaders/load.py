"""From a `[[models]]` entry to weights in memory."""

from __future__ import annotations

import logging
import time

import torch

from engine_service.loaders.gguf import load_gguf
from engine_service.loaders.huggingface import load_huggingface
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_source import resolve_source
from shared.config import ModelConfig

_LOG = logging.getLogger(__name__)


def load_model(config: ModelConfig) -> LoadedModel:
    """Finds and reads the model of `config.source` into main memory, as `config.dtype`.

    Raises ConfigError if the files are missing, of an unknown architecture or incomplete.
    """
    started_s = time.monotonic()
    files = resolve_source(config.source)
    dtype = getattr(torch, config.dtype)
    loaded = load_gguf(files.path, dtype) if files.form == "gguf" else load_huggingface(files.path, dtype)
    _LOG.info(
        "loaded %s (%s, %.0f MiB as %s) in %.1f s",
        files.path.name,
        loaded.spec.architecture,
        loaded.weights.num_bytes / 2**20,
        config.dtype,
        time.monotonic() - started_s,
    )
    return loaded
