"""Blocks of GGUF files as weights of ours: the values that the gguf package reads, exact where we say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.packed_linear import LinearLibrary, PackedLinear, pack_weight
from kernels.gguf_blocks import BLOCK_BYTES, weight_from_blocks
from kernels.quantized_reference import FORMATS, QuantizedWeight, in_one_format, quantize_weight, stacked

EXACT = ("Q4_0", "Q4_1", "Q8_0")
HALVES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1, "Q4_K": 2, "Q6_K": 1}  # float16 numbers of a block,
LAST = ("Q6_K",)  # with which it ends, or else begins


def random_blocks(kind: str, num_rows: int, num_blocks: int, seed: int, magnitude: float = 0.01) -> Any:
    """uint8 `[num_rows, bytes]`; what is no scale may be any byte."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_rows, num_blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    halves = generator.normal(0, magnitude, (num_rows, num_blocks, HALVES[kind])).astype(np.float16)
    place = slice(-2 * HALVES[kind], None) if kind in LAST else slice(2 * HALVES[kind])
    blocks[..., place] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def read_by_gguf(blocks: Any, kind: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))


@pytest.fixture(scope="module")
def library() -> LinearLibrary:
    return LinearLibrary()


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 60), num_blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_blocks_of_32_keep_their_values_exactly_also_when_packed(
    library: LinearLibrary, kind: str, num_rows: int, num_blocks: int, seed: int
) -> None:
    blocks = random_blocks(kind, num_rows, num_blocks, seed)
    weight = weight_from_blocks(torch.from_numpy(blocks), kind)
    expected = read_by_gguf(blocks, kind)
    assert torch.equal(weight.dequantized(), expected)
    layer = PackedLinear(pack_weight(weight, library=library), library=library)
    wanted = torch.tensor([num_rows - 1, 0, num_rows // 2, 0])
    assert torch.equal(layer.rows(wanted), expected[wanted])


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 20), num_blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_a_q4_k_value_moves_by_its_two_rounded_factors_only(
    num_rows: int, num_blocks: int, seed: int
) -> None:
    blocks = random_blocks("Q4_K", num_rows, num_blocks, seed)
    weight = weight_from_blocks(torch.from_numpy(blocks), "Q4_K")
    assert weight.format.name == "int4_group32"
    assert weight.minimums is not None
    error = (weight.dequantized() - read_by_gguf(blocks, "Q4_K")).abs().unflatten(1, (-1, 32))
    smallest = 2.0**-24  # of float16
    scales, minimums = (
        each.float().abs().clamp_min(smallest)[..., None] for each in (weight.scales, weight.minimums)
    )
    values = weight.values.unflatten(1, (-1, 32))
    assert bool(
        (error <= 1.01 * (values * scales.clamp_min(2**-14) + minimums.clamp_min(2**-14)) / 2048).all()
    )


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 20), num_blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_a_q6_k_value_moves_by_its_rounded_scale_only(
    library: LinearLibrary, num_rows: int, num_blocks: int, seed: int
) -> None:
    blocks = random_blocks("Q6_K", num_rows, num_blocks, seed)
    weight = weight_from_blocks(torch.from_numpy(blocks), "Q6_K")
    assert weight.format.name == "int8_group16"
    assert int(weight.values.min()) >= -32
    assert int(weight.values.max()) <= 31
    error = (weight.dequantized() - read_by_gguf(blocks, "Q6_K")).abs().unflatten(1, (-1, 16))
    scales = weight.scales.float().abs()[..., None]
    values = weight.values.unflatten(1, (-1, 16)).abs()
    assert bool((error <= 1.01 * values * scales.clamp_min(2**-14) / 2048).all())
    layer = PackedLinear(pack_weight(weight, library=library), library=library)
    wanted = torch.tensor([num_rows - 1, 0, num_rows // 2, 0])
    assert torch.equal(layer.rows(wanted), weight.dequantized()[wanted])


def test_q4_0_scales_whose_minimum_would_overflow_stay_exact() -> None:
    blocks = random_blocks("Q4_0", 5, 2, seed=1, magnitude=20_000)
    weight = weight_from_blocks(torch.from_numpy(blocks), "Q4_0")
    assert torch.equal(weight.dequantized(), read_by_gguf(blocks, "Q4_0"))


@pytest.mark.parametrize(("kinds", "is_possible"), [
    (("Q4_0", "Q4_1", "Q4_K"), True),
    (("Q4_0", "Q8_0"), True),
    (("Q4_1", "Q8_0"), False),
])  # fmt: skip
def test_parts_of_several_kinds_are_one_matrix_where_one_format_holds_them(
    kinds: tuple[str, ...], is_possible: bool
) -> None:
    per_row = 256
    parts, expected = [], []
    for number, kind in enumerate(kinds):
        blocks = random_blocks(kind, 3, per_row // (256 if kind == "Q4_K" else 32), seed=number)
        parts.append(weight_from_blocks(torch.from_numpy(blocks), kind))
        expected.append(parts[-1].dequantized())
    alike = in_one_format(parts)
    assert (alike is not None) == is_possible
    if alike is not None:
        assert torch.equal(stacked(alike).dequantized(), torch.cat(expected))


def test_rows_in_another_order_and_pieces_of_a_weight_keep_their_values() -> None:
    weight = weight_from_blocks(torch.from_numpy(random_blocks("Q4_1", 12, 3, seed=2)), "Q4_1")
    order = torch.randperm(12)
    assert torch.equal(weight.rows(order).dequantized(), weight.dequantized()[order])
    pieces = weight.split([2, 7, 3])
    assert [piece.shape for piece in pieces] == [(2, 96), (7, 96), (3, 96)]
    assert torch.equal(stacked(pieces).dequantized(), weight.dequantized())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_of_packed_weights_of_any_format(library: LinearLibrary, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    num_inputs = (FORMATS[name].group or 1) * data.draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight = quantize_weight(
        torch.randn(data.draw(st.integers(1, 100)), num_inputs, generator=generator), name
    )
    wanted = torch.randint(weight.num_outputs, (data.draw(st.integers(0, 9)),), generator=generator)
    layer = PackedLinear(weight, library=library)
    torch.testing.assert_close(layer.rows(wanted), weight.dequantized()[wanted], rtol=1e-6, atol=1e-7)


def test_rows_that_are_not_there_are_refused(library: LinearLibrary) -> None:
    weight = quantize_weight(torch.randn(6, 64), "int8_group32")
    for wanted in ([6], [0, -1]):
        with pytest.raises(IndexError, match="rows 0 to 5"):
            PackedLinear(weight, library=library).rows(torch.tensor(wanted))
    with pytest.raises(ValueError, match="gated"):
        PackedLinear(weight, gate="silu", library=library).rows(torch.tensor([0]))


def test_a_weight_that_was_packed_for_a_gate_goes_with_a_gate_only(library: LinearLibrary) -> None:
    weight = quantize_weight(torch.randn(6, 64), "int8_group32")
    packed = pack_weight(weight, is_gated=True, library=library)
    x = torch.randn(3, 64)
    assert torch.equal(
        PackedLinear(packed, gate="silu", library=library)(x),
        PackedLinear(weight, gate="silu", library=library)(x),
    )
    with pytest.raises(ValueError, match="for a gate"):
        PackedLinear(packed, library=library)
    with pytest.raises(ValueError, match="even number"):
        pack_weight(quantize_weight(torch.randn(5, 64), "int8_group32"), is_gated=True, library=library)


def test_blocks_that_are_not_whole_or_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="Q5_K cannot be taken over"):
        weight_from_blocks(torch.zeros(2, 176, dtype=torch.uint8), "Q5_K")
    with pytest.raises(ValueError, match="multiple of 34"):
        weight_from_blocks(torch.zeros(2, 33, dtype=torch.uint8), "Q8_0")


def test_two_ways_of_saying_the_same_are_found_alike_only_where_they_are() -> None:
    """Minimums of -8 scales come from Q4_0; any other would be lost in bytes."""
    four = weight_from_blocks(torch.from_numpy(random_blocks("Q4_0", 2, 1, seed=3)), "Q4_0")
    eight = weight_from_blocks(torch.from_numpy(random_blocks("Q8_0", 2, 1, seed=4)), "Q8_0")
    assert four.minimums is not None
    other = QuantizedWeight(four.format, four.values, four.scales, four.minimums + 1e-3)
    assert in_one_format([four, eight]) is not None
    assert in_one_format([other, eight]) is None
