"""From a `[[models]]` entry to weights in memory."""

from __future__ import annotations

import logging
import time

from engine_service.loaders.gguf import load_gguf
from engine_service.loaders.huggingface import load_huggingface
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_source import resolve_source
from engine_service.models.weight_form import select_form
from shared.config import ModelConfig
from shared.errors import ConfigError

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading raises where a file holds another type or number than its format says. Such files come from
elsewhere, in more ways than could be checked one by one; a ConfigError passes through as it is."""

_LOG = logging.getLogger(__name__)


def load_model(config: ModelConfig, num_threads: int = 1) -> LoadedModel:
    """Finds and reads the model of `config.source` into main memory, matrices as `config.quantization` says.

    With `num_threads` for what is computed on the way. Raises ConfigError if the files are missing, of an
    unknown architecture or incomplete.
    """
    started_s = time.monotonic()
    files = resolve_source(config.source)
    form = select_form(config, num_threads)
    try:
        loaded = load_gguf(files.path, form) if files.form == "gguf" else load_huggingface(files.path, form)
    except MALFORMED as error:
        raise ConfigError(
            f"{files.path.name} is not as its format says ({type(error).__name__}: {error})", "source"
        ) from error
    _check_end_tokens(loaded)
    _LOG.info(
        "loaded %s (%s, %.0f MiB) in %.1f s",
        files.path.name,
        loaded.spec.architecture,
        loaded.weights.num_bytes / 2**20,
        time.monotonic() - started_s,
    )
    return loaded


def _check_end_tokens(loaded: LoadedModel) -> None:
    """Raises ConfigError for an end-of-sequence token that the model cannot say: the sampler relies on it."""
    for token_id in loaded.text_bundle.eos_token_ids:
        if not 0 <= token_id < loaded.spec.vocab_size:
            raise ConfigError(
                f"end-of-sequence token {token_id} is not below the vocabulary's {loaded.spec.vocab_size}",
                "source",
            )
