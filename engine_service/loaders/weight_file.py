"""One file of tensors and a record about them, written whole or not at all, and mapped when it is read.

The format is safetensors' (https://github.com/huggingface/safetensors#format), with the record in its
metadata. Our own writer, because tensors go to the file from where they are, without a copy in between.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.weight_memory import file_in_memory

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHECKSUM = "checksum"
_NO_CHECKSUM = "0" * 16
_LENGTH = struct.Struct("<Q")  # of the header, at the start of the file
_PAGE_BYTES = 4096  # in which checksums are made, and where data begins
_CHUNK_BYTES = 8 << 20
TEMPORARY = ".tmp"
"""How the name of a file ends that is still being written, or was when its process ended."""


class WeightFileError(Exception):
    """A file is not what `write_weight_file` has written."""


@dataclass(frozen=True, slots=True)
class WeightFileHeader:
    record: dict[str, Any]
    places: dict[str, tuple[str, list[int], int, int]]  # type, shape, first byte and end in the data
    data_start: int
    checksum: str


def write_weight_file(
    path: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor], *, mode: int = 0o600
) -> None:
    """Makes or replaces the file. Whoever has the old one open or mapped keeps it. Raises OSError.

    `record` is for JSON, `mode` the file's permissions.
    """
    floats_first = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that all are aligned
    header = _header(record, {name: tensors[name] for name in floats_first})
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            os.fchmod(descriptor, mode)
            checksum, num_bytes = 0, 0
            pieces = (_bytes_of(tensors[name]) for name in floats_first)
            for chunk in _chunks(itertools.chain([memoryview(header)], pieces)):
                checksum += _checksum(np.frombuffer(chunk, dtype=np.uint8), num_bytes)
                num_bytes += file.write(chunk)
            file.seek(header.index(_NO_CHECKSUM.encode()))
            file.write(_as_text(checksum).encode())
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    _sync_folder(path.parent)


def read_header(path: Path) -> WeightFileHeader:
    """Raises OSError, and WeightFileError for a file of another length than it should have."""
    with path.open("rb") as file:
        try:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length))
            record = json.loads(header.pop("__metadata__")["headrace"])
            checksum = str(record.pop(_CHECKSUM))
            places = {
                name: (place["dtype"], place["shape"], *place["data_offsets"])
                for name, place in header.items()
            }
            end = max((place[3] for place in places.values()), default=0)
        # Whatever a damaged file makes of this: deep nesting, no dictionary, a length of exabytes.
        except Exception as error:
            raise WeightFileError(f"its header is not readable ({type(error).__name__}: {error})") from error
        data_start = _LENGTH.size + length
        if (size := os.fstat(file.fileno()).st_size) != data_start + end:
            raise WeightFileError(f"it has {size} bytes and should have {data_start + end}")
    return WeightFileHeader(record, places, data_start, checksum)


def read_weight_file(path: Path, header: WeightFileHeader) -> dict[str, Tensor]:
    """Parts of one piece of memory, which they keep. Raises OSError, and WeightFileError for other bytes."""
    file = file_in_memory(path)
    start = bytearray(file[: header.data_start].numpy())
    start = start.replace(header.checksum.encode(), _NO_CHECKSUM.encode(), 1)
    data = file[header.data_start :]
    sums = _checksum(np.frombuffer(start, dtype=np.uint8)), _checksum(data.numpy(), header.data_start)
    if (found := _as_text(sum(sums))) != header.checksum:
        raise WeightFileError(f"its checksum is {found} and should be {header.checksum}")
    try:
        return {
            name: data[begin:end].view(_DTYPES[dtype]).view(shape)
            for name, (dtype, shape, begin, end) in header.places.items()
        }
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise WeightFileError(f"its tensors do not fit ({type(error).__name__}: {error})") from error


def _header(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"headrace": json.dumps({_CHECKSUM: _NO_CHECKSUM, **record})}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    length = -(-(_LENGTH.size + len(text)) // _PAGE_BYTES) * _PAGE_BYTES - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


def _chunks(pieces: Iterable[memoryview]) -> Iterator[bytearray]:
    """Of _CHUNK_BYTES each but for the last: what is written in huge pages, kernels keep and map in them."""
    chunk = bytearray()
    for piece in pieces:
        begin = 0
        while begin < len(piece):
            part = piece[begin : begin + _CHUNK_BYTES - len(chunk)]
            chunk += part
            begin += len(part)
            if len(chunk) == _CHUNK_BYTES:
                yield chunk
                chunk = bytearray()
    yield chunk


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _checksum(data: np.ndarray[Any, np.dtype[np.uint8]], position: int = 0) -> int:
    """Finds what disks and file systems do to a file (lost pages, flipped bits), at the speed of memory.

    `position` in the file is whole pages. The checksums of a file's parts add up to its own, modulo 2^64.
    """
    page = position // _PAGE_BYTES
    if rest := len(data) % _PAGE_BYTES:
        last = np.zeros(_PAGE_BYTES, dtype=np.uint8)
        last[:rest] = data[len(data) - rest :]
        data = data[: len(data) - rest]
        total = _checksum(last, position + len(data))
    else:
        total = 0
    sums = data.view(np.uint64).reshape(-1, _PAGE_BYTES // 8).sum(axis=1, dtype=np.uint64)
    places = np.arange(2 * page + 1, 2 * (page + len(sums)) + 1, 2, dtype=np.uint64)  # odd: no bit is lost
    return total + int((sums * places).sum(dtype=np.uint64))


def _as_text(checksum: int) -> str:
    return f"{checksum % 2**64:016x}"


def _sync_folder(folder: Path) -> None:
    """Lest the name is lost though the content is there."""
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
