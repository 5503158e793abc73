"""Embedding models: a decoder of ours, with or without its head, or any bare model of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_service.loaders.huggingface import load_decoder, read_architecture
from engine_service.loaders.huggingface_text import read_text_bundle
from engine_service.loaders.json_file import read_json
from engine_service.loaders.load import MALFORMED, check_text, load_model
from engine_service.model_source import resolve_source
from engine_service.models.families import FAMILIES, family_without_head
from engine_service.models.spec import DecoderSpec
from engine_service.models.weight_form import WeightForm, select_form
from engine_service.models.weights import DecoderWeights
from engine_service.pooling import declared_pooling
from shared.config import ModelConfig, Pooling
from shared.errors import ConfigError
from shared.text_bundle import TextBundle

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    spec: DecoderSpec
    weights: DecoderWeights


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    module: Any  # transformers' PreTrainedModel
    vocab_size: int
    context_len: int


@dataclass(frozen=True, slots=True)
class LoadedEmbedder:
    architecture: str
    model: LoadedDecoder | LoadedEncoder
    pooling: Pooling  # what the model's files declare; else "last" for decoders and "mean" for encoders
    text_bundle: TextBundle
    max_text_len: int | None = None  # tokens of a text in training, where the files name fewer than fit
    matryoshka_dimensions: list[int] | None = None  # as in ModelCard


def load_embedder(config: ModelConfig, num_threads: int = 1) -> LoadedEmbedder:
    """As `load_model`. Raises ConfigError if the model of `config.source` cannot give embeddings here."""
    files = resolve_source(config.source)
    if files.form == "gguf":
        loaded = load_model(config, num_threads)
        assert isinstance(loaded.spec, DecoderSpec), "GGUF files hold models of our own families"
        assert isinstance(loaded.weights, DecoderWeights), "and weights of our own form"
        decoder = LoadedDecoder(loaded.spec, loaded.weights)
        return LoadedEmbedder(loaded.spec.architecture, decoder, "last", loaded.text_bundle)
    try:
        embedder = _load_directory(files.path, select_form(config, num_threads))
    except MALFORMED as error:
        raise ConfigError(
            f"{files.path.name} is not as its format says ({type(error).__name__}: {error})", "source"
        ) from error
    check_text(embedder.text_bundle)
    return embedder


def _load_directory(path: Path, form: WeightForm) -> LoadedEmbedder:
    settings = read_json(path / "config.json")
    model = _load(path, settings, form)
    default: Pooling = "last" if isinstance(model, LoadedDecoder) else "mean"
    return LoadedEmbedder(
        read_architecture(settings),
        model,
        declared_pooling(path) or default,
        read_text_bundle(path, settings),
        _max_text_len(path),
        _matryoshka_dimensions(settings),
    )


def _load(path: Path, config: Mapping[str, Any], form: WeightForm) -> LoadedDecoder | LoadedEncoder:
    architecture = read_architecture(config)
    with_head = architecture if architecture in FAMILIES else family_without_head(architecture)
    # Some embedding models are decoders trained to see both ways: transformers knows how, with a mask.
    if with_head is None or config.get("use_bidirectional_attention"):
        if form.rounds:
            raise ConfigError(
                f"{architecture} runs as transformers' own module, whose weights cannot be quantised",
                "quantization",
            )
        return _load_encoder(path, architecture, form.dtype)
    has_head = with_head == architecture
    return LoadedDecoder(*load_decoder(path, config, with_head, form, has_head=has_head))


def _load_encoder(path: Path, architecture: str, dtype: torch.dtype) -> LoadedEncoder:
    # Takes seconds to import; only these models need it.
    from transformers import AutoModel

    try:
        module, loading = AutoModel.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, output_loading_info=True
        )
    # transformers' loading raises whatever it runs into; it all means that the model cannot be run.
    except Exception as error:
        raise ConfigError(
            f"architecture {architecture!r} gives no embeddings: it is no decoder of ours "
            f"({', '.join(sorted(FAMILIES))}), and transformers does not load it: {error}",
            "source",
        ) from error
    # A pooler is trained for another task and not read here; many checkpoints have none.
    absent = [name for name in loading["missing_keys"] if not name.startswith("pooler.")]
    if absent or loading["mismatched_keys"]:
        raise ConfigError(f"tensors are missing or have another shape: {absent[:1]}", "source")
    if module.config.is_encoder_decoder:
        raise ConfigError(f"{architecture}: models of an encoder and a decoder are not supported", "source")
    _LOG.info("%s runs as transformers' module", architecture)
    return LoadedEncoder(module.eval(), int(module.config.vocab_size), _context_len(module))


def _max_text_len(path: Path) -> int | None:
    """As sentence-transformers has it."""
    file = path / "sentence_bert_config.json"
    length = read_json(file).get("max_seq_length") if file.is_file() else None
    return length if isinstance(length, int) and length > 0 else None


def _matryoshka_dimensions(config: Mapping[str, Any]) -> list[int] | None:
    """Whether, and to what, vectors may be shortened: under the names that vLLM reads, too."""
    declared = config.get("matryoshka_dimensions")
    if isinstance(declared, list) and declared:
        return [int(dimensions) for dimensions in declared]
    return [] if config.get("is_matryoshka") is True else None


def _context_len(module: Any) -> int:
    length = int(module.config.max_position_embeddings)
    table = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
    # RoBERTa's positions begin after the padding's: 514 of them are for 512 tokens.
    padding_idx = getattr(table, "padding_idx", None)
    return length if padding_idx is None else length - padding_idx - 1
