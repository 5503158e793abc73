"""From a `[[models]]` entry to weights in memory."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from engine_service.loaders.loaded_model import LoadedModel
from engine_service.loaders.weight_cache import WeightCache
from engine_service.model_source import ModelFiles, resolve_source
from engine_service.models.weight_form import PackedForm, WeightForm, select_form
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer

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
    cache = None
    # Of floats none is kept, and an adapter may be trained on while its base stays as it is.
    may_cache = config.weight_cache and config.lora is None
    if may_cache and isinstance(form, PackedForm) and form.keeps_blocks:
        cache = WeightCache(files, form)
    loaded = cache.load() if cache is not None else None
    is_cached = loaded is not None
    try:
        if loaded is None:
            loaded = _read(files, form, config.lora)
        if not is_cached:
            _check_end_tokens(loaded)
            check_text(loaded.text_bundle)
    except ConfigError as error:  # whoever reads a part knows what is wrong, but not always in which file
        if files.path.name in error.message:
            raise
        raise ConfigError(f"{files.path}: {error.message}", error.param) from error
    except MALFORMED as error:
        raise ConfigError(
            f"{files.path.name} is not as its format says ({type(error).__name__}: {error})", "source"
        ) from error
    _LOG.info(
        "loaded %s%s (%s, %.0f MiB) in %.1f s",
        files.path.name,
        ", packed before" if is_cached else "",
        loaded.spec.architecture,
        loaded.weights.num_bytes / 2**20,
        time.monotonic() - started_s,
    )
    if cache is not None and not is_cached:
        cache.store(loaded)
    return loaded


def _read(files: ModelFiles, form: WeightForm, lora: str | None) -> LoadedModel:
    # Imported here and not above: what reads files is not needed where the cache has them.
    if files.form == "gguf":
        if lora is not None:
            raise ConfigError("an adapter goes with a Hugging Face directory, not with a GGUF file", "lora")
        from engine_service.loaders.gguf import load_gguf

        return load_gguf(files.path, form)
    from engine_service.loaders.huggingface import load_huggingface

    return load_huggingface(files.path, form, None if lora is None else Path(lora).expanduser())


def check_text(text_bundle: TextBundle) -> None:
    """Raises ConfigError if no gateway could use the bundle: then the engine had better not start."""
    try:
        Tokenizer(text_bundle)
    except Exception as error:  # somebody else's template or tokenizer file: any error is possible
        raise ConfigError(f"the model's text files cannot be used: {error}", "source") from error


def _check_end_tokens(loaded: LoadedModel) -> None:
    """Raises ConfigError for an end-of-sequence token that the model cannot say: the sampler relies on it."""
    for token_id in loaded.text_bundle.eos_token_ids:
        if not 0 <= token_id < loaded.spec.vocab_size:
            raise ConfigError(
                f"end-of-sequence token {token_id} is not below the vocabulary's {loaded.spec.vocab_size}",
                "source",
            )
