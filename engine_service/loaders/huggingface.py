"""Models as Hugging Face directories: config.json and safetensors, in one file or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine_service.loaders.huggingface_text import read_text_bundle
from engine_service.loaders.json_file import read_json
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.loaders.lora import LoraAdapter, read_adapter
from engine_service.loaders.transformers import load_transformers
from engine_service.models.decoder_config import read_decoder_spec
from engine_service.models.families import FAMILIES
from engine_service.models.registry import Weights
from engine_service.models.spec import DecoderSpec, ModelSpec
from engine_service.models.weight_form import WeightForm
from engine_service.models.weights import DecoderWeights, NamedTensor, collect_weights
from shared.errors import ConfigError


def load_huggingface(path: Path, form: WeightForm, lora: Path | None = None) -> LoadedModel:
    """`lora`: the directory of an adapter, to be merged into the weights. Raises ConfigError if the directory
    is not a complete model of an architecture that can be run."""
    config = read_json(path / "config.json")
    architecture = read_architecture(config)
    adapter = None if lora is None else read_adapter(lora)
    spec, weights = _load_weights(path, config, architecture, form, adapter)
    return LoadedModel(spec=spec, weights=weights, text_bundle=read_text_bundle(path, config))


def read_architecture(config: Mapping[str, Any]) -> str:
    """The class that config.json names. Raises ConfigError for quantised weights, which nobody here reads."""
    if "quantization_config" in config:
        raise ConfigError(
            "quantised safetensors are not supported; use the original or a GGUF file", "source"
        )
    return str((config.get("architectures") or ["none"])[0])


def load_decoder(
    path: Path,
    config: Mapping[str, Any],
    architecture: str,
    form: WeightForm,
    *,
    has_head: bool = True,
    adapter: LoraAdapter | None = None,
) -> tuple[DecoderSpec, DecoderWeights]:
    """A model of FAMILIES. Without a head its tensors have no `model.` before their names."""
    family = FAMILIES[architecture]
    spec = read_decoder_spec(config if has_head else {**config, "tie_word_embeddings": True}, architecture)
    prefix = "" if has_head else "model."
    stored = _read_tensors(path)
    tensors = (
        (prefix + name, tensor)
        for stored_name, tensor in (stored if adapter is None else adapter.merged(stored))
        if (name := family.tensor_name(stored_name)) is not None
    )
    return spec, collect_weights(spec, tensors, form)


def _load_weights(
    path: Path,
    config: Mapping[str, Any],
    architecture: str,
    form: WeightForm,
    adapter: LoraAdapter | None,
) -> tuple[ModelSpec, Weights]:
    if architecture not in FAMILIES:
        if adapter is not None:
            raise ConfigError(
                f"{architecture} runs as transformers' own module, which takes no adapter", "lora"
            )
        if form.rounds:
            raise ConfigError(
                f"{architecture} runs as transformers' own module, whose weights cannot be quantised",
                "quantization",
            )
        return load_transformers(path, architecture, form.dtype)
    return load_decoder(path, config, architecture, form, adapter=adapter)


def _read_tensors(path: Path) -> Iterator[NamedTensor]:
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {error}", "source") from error


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise ConfigError(
        f"directory {path} has no model.safetensors and no model.safetensors.index.json", "source"
    )
