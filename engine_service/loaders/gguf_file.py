"""The GGUF container: typed metadata and tensors in one file.

Our own reader of the header, because the `gguf` package's builds several objects per array element:
2.1 s for a vocabulary of 49k tokens, against 0.1 s here. Its block formats and dequantisers are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from shared.errors import ConfigError

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# value type number -> format for struct and numpy
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SUPPORTED_TYPES = frozenset(
    {
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q6_K,
    }
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]  # slowest dimension first, as numpy and torch have it
    kind: GGMLQuantizationType
    offset: int  # from the start of the file

    @property
    def num_bytes(self) -> int:
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[self.kind]
        return int(math.prod(self.shape) // values_per_block * bytes_per_block)


class GgufFile:
    """Metadata in memory, tensors read and dequantised on demand. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is not GGUF or is cut short."""
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error}", "source") from error
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            self._file.close()
            raise ConfigError(f"cannot read {path}: {error}", "source") from error
        try:
            self.metadata, self._tensors = _read_header(self._map)
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            self.close()
            raise ConfigError(f"{path} is not a readable GGUF file: {error}", "source") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value. Raises ConfigError if it is there with another type."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise ConfigError(f"{self.path}: metadata {key!r} is not a {kind.__name__}", "source")

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.path}: metadata {key!r} is missing", "source")
        return value

    @property
    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor_kind(self, name: str) -> str:
        """The block format, as ggml calls it: "F32", "Q4_1" ..."""
        return str(self._tensors[name].kind.name)

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """In float32. Raises ConfigError for a block format outside SUPPORTED_TYPES."""
        info, rows = self._tensors[name], self.blocks(name)
        if info.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            stored = np.float32 if info.kind is GGMLQuantizationType.F32 else np.float16
            return rows.view(stored).astype(np.float32).reshape(info.shape)
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(rows, info.kind)
        return values.reshape(info.shape)

    def blocks(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """As it is stored: `[rows, bytes of a row]`. Raises ConfigError as `tensor` does."""
        info = self._tensors[name]
        if info.kind not in SUPPORTED_TYPES:
            known = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
            raise ConfigError(
                f"{self.path}: tensor {name!r} is stored as {info.kind.name}; supported: {known}", "source"
            )
        if info.offset + info.num_bytes > len(self._map):
            raise ConfigError(f"{self.path} is cut short: tensor {name!r} lies past its end", "source")
        # Not from the map, whose pages would count as this process's memory until it is closed.
        self._file.seek(info.offset)
        raw = np.fromfile(self._file, dtype=np.uint8, count=info.num_bytes)
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[info.kind]
        return raw.reshape(-1, info.shape[-1] // values_per_block * bytes_per_block)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.position)
        self.position += struct.calcsize(kind)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        if self.position + length > len(self._data):
            raise ValueError("a string runs past the end")
        text = self._data[self.position : self.position + length].decode("utf-8")
        self.position += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind not in _SCALARS:
            return [self.value(item_kind) for _ in range(count)]
        values = np.frombuffer(
            self._data,
            dtype=np.dtype(_SCALARS[item_kind]).newbyteorder("<"),
            count=count,
            offset=self.position,
        )
        self.position += values.nbytes
        return values.tolist()


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, _TensorInfo]]:
    if data[:4] != _MAGIC:
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.position = len(_MAGIC)
    if (version := cursor.scalar("I")) not in _SUPPORTED_VERSIONS:
        raise ValueError(f"version {version}, supported: {_SUPPORTED_VERSIONS}")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    found: list[_TensorInfo] = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.scalar("I")
        fastest_first = [cursor.scalar("Q") for _ in range(num_dims)]
        kind = GGMLQuantizationType(cursor.scalar("I"))
        found.append(_TensorInfo(name, tuple(reversed(fastest_first)), kind, cursor.scalar("Q")))
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    start = -(-cursor.position // alignment) * alignment  # offsets count from here
    tensors = {
        info.name: _TensorInfo(info.name, info.shape, info.kind, start + info.offset) for info in found
    }
    if len(tensors) < len(found):
        raise ValueError("two tensors have the same name")
    _check_places(list(tensors.values()), alignment, start)
    return metadata, tensors


def _check_places(tensors: list[_TensorInfo], alignment: int, start: int) -> None:
    """Raises ValueError for a tensor that begins where none may: its numbers would be another one's."""
    in_order = sorted(tensors, key=lambda info: info.offset)
    for info in in_order:
        if (info.offset - start) % alignment:
            raise ValueError(f"tensor {info.name!r} does not begin at a multiple of {alignment} bytes")
    for info, following in itertools.pairwise(in_order):
        if info.offset + info.num_bytes > following.offset:
            raise ValueError(f"tensor {info.name!r} runs into {following.name!r}")
