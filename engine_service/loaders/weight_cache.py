"""Packed weights on disk: the second start of a model maps what the first one has computed.

A file of it fits if it was made from the same content, by the same code, for the same form of the weights and
the same layout of the packed ones, which depends on the instruction set. The content of model files is hashed
when a cache file is made; later it is taken to be the same as long as their sizes, times and inodes are.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import tokenizers
import torch
from torch import Tensor

from engine_service.loaders.loaded_model import LoadedModel
from engine_service.loaders.weight_file import (
    TEMPORARY,
    WeightFileError,
    WeightFileHeader,
    read_header,
    read_weight_file,
    write_weight_file,
)
from engine_service.model_source import ModelFiles
from engine_service.models import spec as spec_module
from engine_service.models.spec import DecoderSpec
from engine_service.models.weight_form import Matrix, PackedForm, PackedStack
from engine_service.models.weights import DecoderWeights, ExpertWeights, LayerWeights
from kernels.cpu.build import cpu_model, user_cache_folder
from kernels.cpu.packed_linear import PACKED_FORMATS, PackedWeight, layout_signature
from kernels.quantized_reference import FORMATS
from shared.text_bundle import TextBundle

_LOG = logging.getLogger(__name__)

_FOLDER = ".headrace-weights"
_SUFFIX = ".safetensors"
_TEXT_BUNDLE = "text_bundle"
_HASH_DIGITS = 16
_ABANDONED_S = 3600.0  # so old is no file that is still being written
_PROJECT = Path(__file__).parents[2]
# What decides what lies in a file, but for the model. All of it: a key that forgets something gives wrong
# answers after an update.
_CODE = (
    "engine_service/loaders/*.py",
    "engine_service/models/*.py",
    "kernels/gguf_blocks.py",
    "kernels/quantized_reference.py",
    "kernels/cpu/packed_linear.py",
    "shared/chat_template.py",
    "shared/text_bundle.py",
    "shared/tokenizer.py",
)


class WeightCache:
    """The cache file of one model in one form. Several processes may use and write it at once."""

    def __init__(self, files: ModelFiles, form: PackedForm) -> None:
        self._sources = _source_files(files)
        self._identity = _identity(self._sources)  # before they are read
        path = files.path.resolve()
        # The path in it, because the user's folder has the files of all models.
        self._stem = f"{path.stem}-{_hash(str(path).encode())}"
        self._folders = [path.parent / _FOLDER, user_cache_folder() / "weights"]
        if files.form == "huggingface":
            self._folders[0] = path / _FOLDER
        self._key = {
            "form": "int8" if form.rounds else "stored",
            "layout": layout_signature(form.library),
            "code": _code_hash(),
            "tokenizers": tokenizers.__version__,  # which has tried the model's text
        }
        self._name = f"{self._stem}-{self._key['form']}-{self._key['layout']}{_SUFFIX}"

    def load(self) -> LoadedModel | None:
        """None if there is no file that fits. One that cannot be read is warned of."""
        for folder in self._folders:
            path = folder / self._name
            try:
                header = read_header(path)
                if not self._fits(header):
                    continue
                loaded = _unpacked(header, read_weight_file(path, header))
                self._remove_outdated(folder)  # what a killed process left may be old enough only now
                return loaded
            except FileNotFoundError:
                continue
            except (OSError, WeightFileError) as error:
                _LOG.warning("cached weights in %s cannot be used, and are made anew: %s", path, error)
        return None

    def store(self, loaded: LoadedModel) -> None:
        """Does nothing for a model of which nothing is quantised, and where no folder can be written.

        Floats are packed about as fast as files are read: one as large as the model would save nothing.
        """
        weights = loaded.weights
        if not isinstance(weights, DecoderWeights) or not isinstance(loaded.spec, DecoderSpec):
            return
        matrices, stacks = _matrices_and_stacks(weights)
        packed = {name: matrix for name, matrix in matrices.items() if isinstance(matrix, PackedWeight)}
        if not any(weight.format.name in FORMATS for weight in packed.values()):
            return
        if _identity(self._sources) != self._identity:  # replaced while they were read
            return
        tensors = {
            name: matrix.packed if isinstance(matrix, PackedWeight) else matrix
            for name, matrix in matrices.items()
        }
        text = bytearray(msgspec.msgpack.encode(loaded.text_bundle))
        tensors[_TEXT_BUNDLE] = torch.frombuffer(text, dtype=torch.uint8)
        record = {
            "key": self._key,
            "cpu": _hash(cpu_model().encode()),
            "content": _content_hash(self._sources),
            "identity": self._identity,
            "spec": _encoded(loaded.spec),
            "packed": {
                name: [weight.format.name, weight.num_outputs, weight.num_inputs, weight.is_gated]
                for name, weight in packed.items()
            },
            "stacks": stacks,
        }
        if _identity(self._sources) != self._identity:  # replaced while it was hashed
            return
        mode = _mode(self._sources)
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_weight_file(folder / self._name, record, tensors, mode=mode)
            except OSError as error:  # read-only, or full: try the next folder
                _LOG.info("packed weights cannot be kept in %s: %s", folder, error)
                continue
            self._remove_outdated(folder)
            return

    def _fits(self, header: WeightFileHeader) -> bool:
        record = header.record
        if record.get("key") != self._key:
            return False
        if record.get("identity") == self._identity:
            return True
        return bool(record.get("content") == _content_hash(self._sources))

    def _remove_outdated(self, folder: Path) -> None:
        """What this machine's engines made of this model and form with earlier code, for another layout; what
        a process that was killed left half-written. What is made for other instruction sets or on machines
        with other processors stays."""
        prefix = f"{self._stem}-{self._key['form']}-"
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                is_other = path.suffix == _SUFFIX and path.name != self._name and path.name.startswith(prefix)
                is_scrap = path.name.startswith(f".{self._stem}-") and _is_abandoned(path)
                if is_scrap or (is_other and self._is_outdated(path)):
                    path.unlink()

    def _is_outdated(self, path: Path) -> bool:
        try:
            record = read_header(path).record
        except WeightFileError:
            return True  # nobody can use it
        is_current = record.get("key", {}).get("code") == self._key["code"]
        return record.get("cpu") == _hash(cpu_model().encode()) and not is_current


def _is_abandoned(path: Path) -> bool:
    return path.suffix == TEMPORARY and time.time() - path.stat().st_mtime > _ABANDONED_S


# -------------------------------------------------------------------------- what a file was made from


def _source_files(files: ModelFiles) -> list[Path]:
    if files.form == "gguf":
        return [files.path]
    wanted = (".safetensors", ".json", ".jinja", ".model")
    return sorted(path for path in files.path.iterdir() if path.suffix in wanted and path.is_file())


def _identity(paths: list[Path]) -> list[list[Any]]:
    """Changes whenever a file is written or replaced, even by one with old times: inodes have their own."""
    found = [(path.name, path.stat()) for path in paths]
    return [[name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev] for name, at in found]


def _mode(paths: list[Path]) -> int:
    """Who may read all of the model may read what is made of it."""
    allowed = 0o644
    for path in paths:
        allowed &= path.stat().st_mode
    return allowed | 0o600


def _content_hash(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _code_hash() -> str:
    digest = hashlib.sha256()
    for pattern in _CODE:
        for path in sorted(_PROJECT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_HASH_DIGITS]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_HASH_DIGITS]


# -------------------------------------------------------------------------- weights and names


def _matrices_and_stacks(weights: DecoderWeights) -> tuple[dict[str, Tensor | PackedWeight], dict[str, int]]:
    """By name; those in a stack as `name.number`, and how many a stack has."""
    matrices: dict[str, Tensor | PackedWeight] = {}
    stacks: dict[str, int] = {}
    for name, matrix in _named_matrices(weights):
        if isinstance(matrix, PackedStack):
            stacks[name] = len(matrix.parts)
            matrices |= {f"{name}.{number}": part for number, part in enumerate(matrix.parts)}
        else:
            matrices[name] = matrix
    return matrices, stacks


def _named_matrices(weights: DecoderWeights) -> Iterator[tuple[str, Matrix]]:
    yield "embedding", weights.embedding
    yield "norm", weights.norm
    if weights.head is not weights.embedding:
        yield "head", weights.head
    for index, layer in enumerate(weights.layers):
        yield from _named_parts(f"{index}.", layer)


def _named_parts(prefix: str, parts: LayerWeights | ExpertWeights) -> Iterator[tuple[str, Matrix]]:
    for field in fields(parts):
        value = getattr(parts, field.name)
        if isinstance(value, ExpertWeights):
            yield from _named_parts(f"{prefix}{field.name}.", value)
        elif value is not None:
            yield f"{prefix}{field.name}", value


def _unpacked(header: WeightFileHeader, tensors: dict[str, Tensor]) -> LoadedModel:
    """Raises WeightFileError for a record that says something else than this module writes."""
    try:
        text_bundle = msgspec.msgpack.decode(bytes(tensors.pop(_TEXT_BUNDLE).numpy()), type=TextBundle)
        spec = _decoded(header.record["spec"])
        matrices: dict[str, Any] = dict(tensors)
        for name, (format_name, num_outputs, num_inputs, is_gated) in header.record["packed"].items():
            matrices[name] = PackedWeight(
                PACKED_FORMATS[format_name], num_outputs, num_inputs, is_gated, tensors[name]
            )
        for name, num_parts in header.record["stacks"].items():
            matrices[name] = PackedStack(tuple(matrices[f"{name}.{number}"] for number in range(num_parts)))
        weights = _weights(spec, matrices)
    except Exception as error:  # whatever a record of somebody else makes of this
        raise WeightFileError(f"its record does not fit ({type(error).__name__}: {error})") from error
    return LoadedModel(spec=spec, weights=weights, text_bundle=text_bundle)


def _weights(spec: DecoderSpec, matrices: Mapping[str, Any]) -> DecoderWeights:
    def parts(kind: type, prefix: str) -> dict[str, Any]:
        return {field.name: matrices.get(f"{prefix}{field.name}") for field in fields(kind)}

    layers = []
    for index, layer in enumerate(spec.layers):
        has_experts = layer.experts is not None
        experts = ExpertWeights(**parts(ExpertWeights, f"{index}.experts.")) if has_experts else None
        layers.append(LayerWeights(**(parts(LayerWeights, f"{index}.") | {"experts": experts})))
    return DecoderWeights(
        embedding=matrices["embedding"],
        layers=tuple(layers),
        norm=matrices["norm"],
        head=matrices["embedding"] if spec.has_tied_head else matrices["head"],
    )


# -------------------------------------------------------------------------- the spec as JSON


_SPEC_CLASSES = MappingProxyType(
    {name: each for name, each in vars(spec_module).items() if isinstance(each, type) and is_dataclass(each)}
)


def _encoded(value: Any) -> Any:
    """Dataclasses of models/spec.py with their names, tuples as lists."""
    if is_dataclass(value):
        own = {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
        return {"class": type(value).__name__, **own}
    return [_encoded(each) for each in value] if isinstance(value, tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        own = {name: _decoded(each) for name, each in value.items() if name != "class"}
        return _SPEC_CLASSES[value["class"]](**own)
    return tuple(_decoded(each) for each in value) if isinstance(value, list) else value
