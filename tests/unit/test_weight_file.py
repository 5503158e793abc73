"""Files of tensors: what was written comes back, and what is not whole is found out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from engine_service.loaders.weight_file import (
    WeightFileError,
    read_header,
    read_weight_file,
    write_weight_file,
)
from kernels.cpu.weight_memory import file_in_memory, new_memory

RECORD = {"key": "value", "numbers": [1, 2.5, None]}


def some_tensors(seed: int = 0, *, num_bytes: int = 12_345) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "packed": torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8),
        "norm": torch.randn(17, generator=generator),
        "matrix": torch.randn(5, 7, generator=generator).T,  # not contiguous
        "half": torch.randn(3, generator=generator).to(torch.bfloat16),
    }


def read(path: Path) -> dict[str, Tensor]:
    return read_weight_file(path, read_header(path))


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name])


@settings(max_examples=30, deadline=None)
@given(num_bytes=st.sampled_from([0, 1, 4096, 12_345, 8 << 20, (8 << 20) + 1]) | st.integers(0, 100_000))
def test_what_was_written_comes_back(tmp_path_factory: pytest.TempPathFactory, num_bytes: int) -> None:
    path = tmp_path_factory.mktemp("file") / "weights"
    tensors = some_tensors(num_bytes=num_bytes)
    write_weight_file(path, RECORD, tensors)
    assert read_header(path).record == RECORD
    assert_same(read(path), tensors)


def test_others_can_read_it_as_safetensors(tmp_path: Path) -> None:
    write_weight_file(tmp_path / "weights", RECORD, some_tensors())
    with safe_open(tmp_path / "weights", framework="pt") as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, some_tensors())  # noqa: SIM118
        assert json.loads(file.metadata()["headrace"])["key"] == "value"


def test_a_file_that_is_replaced_stays_what_it_was_for_those_who_have_it(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weight_file(path, RECORD, some_tensors())
    before = read(path)
    write_weight_file(path, RECORD, some_tensors(seed=1))
    assert_same(before, some_tensors())
    assert_same(read(path), some_tensors(seed=1))


def test_writing_to_what_was_read_does_not_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weight_file(path, RECORD, some_tensors(num_bytes=5 << 20))
    read(path)["norm"].zero_()
    assert_same(read(path), some_tensors(num_bytes=5 << 20))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_bit_is_found_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("file") / "weights"
    write_weight_file(path, RECORD, some_tensors())
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(WeightFileError):
        read(path)


def test_pages_that_have_changed_places_or_are_lost_are_found(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weight_file(path, RECORD, some_tensors())
    content = path.read_bytes()
    swapped = content[:4096] + content[8192:12_288] + content[4096:8192] + content[12_288:]
    lost = content[:4096] + bytes(4096) + content[8192:]
    for broken in (swapped, lost):
        path.write_bytes(broken)
        with pytest.raises(WeightFileError, match="checksum"):
            read(path)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_that_was_cut_off_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("file") / "weights"
    write_weight_file(path, RECORD, some_tensors())
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(WeightFileError):
        read(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weight_file(path, RECORD, some_tensors())
    fresh = {
        "large": torch.zeros(20 << 20, dtype=torch.uint8),
        "absent": torch.empty(3, dtype=torch.uint8, device="meta"),
    }
    with pytest.raises(TypeError):
        write_weight_file(path, RECORD, fresh)
    assert_same(read(path), some_tensors())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, (6 << 20) + 3])
def test_bytes_of_a_file_that_is_not_mapped_in_huge_pages_are_copied(num_bytes: int) -> None:
    """As of a file system in memory, for which most kernels have none."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(range(256)) * (num_bytes // 256 + 1))
        file.truncate(num_bytes)
        file.flush()
        found = file_in_memory(Path(file.name))
        file.truncate(0)  # what is mapped would be gone
        assert len(found) == num_bytes
        assert bytes(found.numpy()) == (bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="it is read there")
def test_memory_goes_back_to_the_system_with_the_last_tensor_of_it() -> None:
    memory = new_memory(8 << 20)
    address = memory.data_ptr()
    part = memory[5:10].view(torch.int8)
    del memory
    assert is_mapped(address)
    assert part.tolist() == [0] * 5
    del part
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
