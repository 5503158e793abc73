"""The linear layers agree with their references; a row's result depends on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from kernels.cpu import build
from kernels.cpu.packed_linear import FLOAT_FORMATS, ActivationBits, Gate, LinearLibrary, PackedLinear
from kernels.cpu.team import Team
from kernels.cpu.weight_memory import WeightMemory
from kernels.gguf_blocks import weight_from_blocks
from kernels.quantized_reference import (
    FORMATS,
    QuantizedWeight,
    quantize_activations,
    quantize_weight,
    reference_linear,
    stacked,
)

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 128, 512)
TOLERANCE = 5e-7  # of the sum of magnitudes: float32 sums over segments
FLOATS = {each.name: dtype for dtype, each in FLOAT_FORMATS.items()}
BYTES = "int4_group32 and 8-bit activations"
QUANTIZED = (*FORMATS, BYTES)
NAMES = (*QUANTIZED, *FLOATS)
NEEDED_FLAGS = {
    "native": set[str](),
    "portable": set[str](),
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
}


def cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


# Each is compiled on its first run, some ten seconds long; the others are tried by `make soak`.
ALWAYS = ("native", "avx2")
BUILDS = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.soak) for name in build.INSTRUCTION_SETS
]


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest) -> LinearLibrary:
    missing = NEEDED_FLAGS[request.param] - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    return LinearLibrary(request.param)


@pytest.fixture(scope="module")
def native() -> LinearLibrary:
    return LinearLibrary()


@pytest.fixture(scope="module")
def native_team(native: LinearLibrary) -> Team:
    return two_threads(native)


def two_threads(library: LinearLibrary) -> Team:
    return Team(2, library=library.library)


def weight_name(name: str) -> str:
    return name.split()[0]


def bits_of(name: str) -> ActivationBits:
    return 8 if name == BYTES else 16


def random_weight(num_outputs: int, num_inputs: int, name: str, seed: int = 0) -> QuantizedWeight:
    return quantize_weight(random_floats(num_outputs, num_inputs, seed), weight_name(name))


def random_matrix(
    num_outputs: int, num_inputs: int, format_name: str, seed: int = 0
) -> QuantizedWeight | Tensor:
    if format_name in QUANTIZED:
        return random_weight(num_outputs, num_inputs, format_name, seed)
    return random_floats(num_outputs, num_inputs, seed).to(FLOATS[format_name])


def random_floats(num_outputs: int, num_inputs: int, seed: int) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed))


def random_rows(num_rows: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def assert_agrees(
    ours: Tensor,
    x: Tensor,
    weight: QuantizedWeight | Tensor,
    bias: Tensor | None = None,
    activation_bits: int = 16,
) -> None:
    if isinstance(weight, Tensor):
        exact_bias = None if bias is None else bias.double()
        expected = linear(x.double(), weight.double(), exact_bias).float()
        floats = weight.float()
    else:
        expected, floats = (
            reference_linear(x, weight, bias, activation_bits=activation_bits),
            weight.dequantized(),
        )
    magnitude = x.abs() @ floats.abs().T + (0 if bias is None else bias.abs())
    if isinstance(weight, QuantizedWeight) and weight.minimums is not None:
        # q * scale and the minimum may cancel: both are summed
        spread = weight.minimums.float().abs().repeat_interleave(32, 1)
        magnitude = magnitude + 2 * x.abs() @ spread.T
    error = (ours - expected).abs() / magnitude.clamp_min(1e-30)
    assert float(error.max()) < TOLERANCE  # NaN is not below it


@pytest.mark.parametrize("format_name", NAMES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(24, 64), (7, 576), (101, 1088)])
def test_every_format_agrees_with_the_reference(
    library: LinearLibrary, format_name: str, num_outputs: int, num_inputs: int
) -> None:
    weight = random_matrix(num_outputs, num_inputs, format_name)
    bias = random_rows(1, num_outputs, seed=2)[0]
    bits = bits_of(format_name)
    layer = PackedLinear(weight, bias, activation_bits=bits, library=library)
    for num_rows in (1, 17, 70):
        x = random_rows(num_rows, num_inputs)
        assert_agrees(layer(x), x, weight, bias, bits)


@pytest.mark.parametrize("format_name", NAMES)
def test_a_row_alone_and_in_any_batch_gives_the_same_bits(library: LinearLibrary, format_name: str) -> None:
    weight = random_matrix(101, 576, format_name)
    x = random_rows(max(ROWS), 576)
    layers = [
        PackedLinear(weight, activation_bits=bits_of(format_name), team=team, library=library)
        for team in (None, two_threads(library))
    ]
    whole = layers[0](x)
    for layer in layers:
        for num_rows in ROWS:
            assert torch.equal(layer(x[:num_rows]), whole[:num_rows])
        for row in (1, 17, 511):
            assert torch.equal(layer(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("format_name", QUANTIZED)
@pytest.mark.parametrize("num_inputs", [64, 192, 1088])
def test_every_instruction_set_gives_the_same_bits(
    library: LinearLibrary,
    native: LinearLibrary,
    format_name: str,
    num_inputs: int,
    request: pytest.FixtureRequest,
) -> None:
    if request.node.callspec.params["library"] == "portable":
        pytest.skip("it adds products in two steps, and rounds twice")
    weight = random_weight(101, num_inputs, format_name)
    for num_rows in (1, 5, 7, 16, 17, 40):  # AMX takes over between 5 and 7, where there is AMX
        x = random_rows(num_rows, num_inputs)
        ours, expected = (
            PackedLinear(weight, activation_bits=bits_of(format_name), library=each)(x)
            for each in (library, native)
        )
        assert torch.equal(ours, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_shapes_and_strides(native: LinearLibrary, native_team: Team, data: st.DataObject) -> None:
    format_name = data.draw(st.sampled_from(NAMES))
    group = (FORMATS[weight_name(format_name)].group if format_name in QUANTIZED else None) or 1
    num_inputs = group * data.draw(st.integers(1, 1200 // group))
    weight = random_matrix(
        data.draw(st.integers(1, 130)), num_inputs, format_name, data.draw(st.integers(0, 99))
    )
    num_rows, gap = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 9))
    x = random_rows(num_rows, num_inputs + gap)[:, gap:]
    bias = random_rows(1, weight.shape[0])[0] if data.draw(st.booleans()) else None
    team, bits = data.draw(st.sampled_from((None, native_team))), bits_of(format_name)
    layer = PackedLinear(weight, bias, activation_bits=bits, team=team, library=native)
    assert_agrees(layer(x), x, weight, bias, bits)


@pytest.mark.parametrize("format_name", ["int8_channel", *FLOATS])
@pytest.mark.parametrize("num_inputs", [1, 31, 33, 577])
def test_formats_without_groups_take_any_width(
    library: LinearLibrary, format_name: str, num_inputs: int
) -> None:
    weight = random_matrix(9, num_inputs, format_name)
    x = random_rows(6, num_inputs)
    assert_agrees(PackedLinear(weight, library=library)(x), x, weight)


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_sums_as_large_as_they_can_be_do_not_overflow(library: LinearLibrary, format_name: str) -> None:
    largest_nibbles = torch.full((3, 1024), 2.0)
    largest_nibbles[:, ::32] = 0.0  # the smallest of each group: all others are 15
    bits = bits_of(format_name)
    for floats in (torch.full((3, 4480), -2.0), largest_nibbles):
        weight = quantize_weight(floats, weight_name(format_name))
        x = torch.full((5, floats.shape[1]), 3.0)
        assert_agrees(PackedLinear(weight, activation_bits=bits, library=library)(x), x, weight, None, bits)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("format_name", ["int8_channel", "int4_group32", BYTES, "bfloat16"])
def test_a_gate_works_on_the_halves(library: LinearLibrary, gate: Gate, format_name: str) -> None:
    weight = random_matrix(202, 576, format_name)
    bias = random_rows(1, 202, seed=2)[0]
    bits = bits_of(format_name)
    layer = PackedLinear(
        weight, bias, gate=gate, activation_bits=bits, team=two_threads(library), library=library
    )
    x = random_rows(33, 576) / 24  # what is gated is about 1
    exact = (
        linear(x, weight.float(), bias)
        if isinstance(weight, Tensor)
        else reference_linear(x, weight, bias, activation_bits=bits)
    )
    gates, up = exact.chunk(2, dim=-1)
    activated = silu(gates) if gate == "silu" else gelu(gates, approximate="tanh")
    torch.testing.assert_close(layer(x), activated * up, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer(x)[7:8], layer(x[7:8]))


@pytest.mark.parametrize("format_name", ["int8_group32", "float32"])
def test_a_residual_is_added_to_in_place(library: LinearLibrary, format_name: str) -> None:
    layer = PackedLinear(random_matrix(50, 576, format_name), team=two_threads(library), library=library)
    x, wide = random_rows(9, 576), random_rows(9, 60, seed=3)
    before = wide.clone()
    layer.add_to(wide[:, 4:54], x)
    assert torch.equal(wide[:, 4:54], before[:, 4:54] + layer(x))
    assert torch.equal(wide[:, :4], before[:, :4])
    assert torch.equal(wide[:, 54:], before[:, 54:])


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_extreme_activations(library: LinearLibrary, format_name: str) -> None:
    weight = random_weight(30, 128, format_name)
    bits = bits_of(format_name)
    layer = PackedLinear(weight, activation_bits=bits, library=library)
    x = random_rows(8, 128)
    x[0] = 0
    x[1, 5] = 1e30  # an outlier: the rest rounds to nothing
    x[2] = 1e-42  # denormal
    x[3] *= 1e30
    x[4, 0] = float("inf")
    x[5, 127] = float("nan")
    x[6, 3] = float("-inf")
    ours = layer(x)
    usable = [0, 1, 2, 3, 7]
    assert_agrees(ours[usable], x[usable], weight, None, bits)
    assert torch.equal(ours[0], torch.zeros(30))
    assert ours[[4, 5, 6]].isnan().all()
    assert torch.equal(ours[7:8], layer(x[7:8]))


@pytest.mark.parametrize("format_name", FLOATS)
def test_float_weights_take_what_is_not_finite_as_torch_does(
    library: LinearLibrary, format_name: str
) -> None:
    weight = random_floats(30, 64, seed=0).to(FLOATS[format_name])
    weight[3, 5], weight[4, 6] = float("inf"), float("nan")
    x = random_rows(6, 64)
    x[1, 2], x[2, 3], x[3] = float("inf"), float("nan"), 0
    expected = linear(x, weight.float())
    torch.testing.assert_close(PackedLinear(weight, library=library)(x), expected, equal_nan=True)


@pytest.mark.parametrize("format_name", NAMES)
def test_rows_of_the_weight_come_back(library: LinearLibrary, format_name: str) -> None:
    weight = random_matrix(101, 192, format_name)
    indices = torch.tensor([100, 0, 47, 48, 0])
    exact = weight.float() if isinstance(weight, Tensor) else weight.dequantized()
    ours = PackedLinear(weight, library=library).rows(indices)
    torch.testing.assert_close(ours, exact[indices], rtol=1e-6, atol=1e-6)


def test_activations_keep_almost_all_their_bits() -> None:
    x = random_rows(4, 576)
    values, scales = quantize_activations(x)
    assert float((values * scales[:, None] - x).abs().max()) <= float(x.abs().max()) / 65534 * 1.001


def test_bytes_of_activations_keep_their_groups_apart() -> None:
    x = random_rows(4, 576)
    x[:, 7] = 1000.0  # coarsens its own group only
    values, scales = quantize_activations(x, 8)
    error = ((values * scales[:, None] - x).abs().view(4, -1, 32)).amax(-1)
    assert bool((error <= x.view(4, -1, 32).abs().amax(-1) / 254 * 1.01 + 1e-6).all())


def q4_row(kind: str, num_blocks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random blocks of a row as bytes, and the values that the format's description gives them."""
    scales = torch.randn(num_blocks, generator=generator).half()
    minimums = torch.randn(num_blocks, generator=generator).half()
    if kind == "Q8_0":
        quantized = torch.randint(-127, 128, (num_blocks, 32), generator=generator, dtype=torch.int8)
        parts = [scales[:, None].view(torch.uint8), quantized.view(torch.uint8)]
        return torch.cat(parts, 1).flatten(), (scales.float()[:, None] * quantized).flatten()
    quantized = torch.randint(0, 16, (num_blocks, 32), generator=generator, dtype=torch.uint8)
    nibbles = quantized[:, :16] | (quantized[:, 16:] << 4)
    if kind == "Q4_0":
        parts = [scales[:, None].view(torch.uint8), nibbles]
        return torch.cat(parts, 1).flatten(), (scales.float()[:, None] * (quantized.float() - 8)).flatten()
    parts = [scales[:, None].view(torch.uint8), minimums[:, None].view(torch.uint8), nibbles]
    values = scales.float()[:, None] * quantized + minimums.float()[:, None]
    return torch.cat(parts, 1).flatten(), values.flatten()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_taken_over_without_rounding(native: LinearLibrary, kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = [q4_row(kind, 18, generator) for _ in range(50)]
    weight = weight_from_blocks(torch.stack([row for row, _ in rows]), kind)
    exact = torch.stack([values for _, values in rows])
    torch.testing.assert_close(weight.dequantized(), exact, rtol=1e-6, atol=1e-6)
    x = random_rows(3, 576)
    ours = PackedLinear(weight, library=native)(x)
    torch.testing.assert_close(ours, x @ exact.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_rounded_weight_is_within_half_a_step(format_name: str) -> None:
    weight = random_rows(6, 128)
    weight[2] = 0
    weight[3] = 0.25
    weight[4] *= 1e-3  # scales are subnormal in half precision
    quantized = quantize_weight(weight, format_name)
    step = quantized.scales.float().repeat_interleave(128 // quantized.scales.shape[1], 1)
    error = (quantized.dequantized() - weight).abs()
    slack = 0.57 if quantized.minimums is None else 0.65  # scales and minimums are themselves rounded
    assert bool((error <= slack * step + 1e-6).all())


def test_stacked_weights_are_the_layers_side_by_side(native: LinearLibrary) -> None:
    parts = [random_weight(outputs, 64, "int4_group32", seed=outputs) for outputs in (9, 3, 3)]
    x = random_rows(2, 64)
    together = PackedLinear(stacked(parts), library=native)(x)
    alone = torch.cat([PackedLinear(part, library=native)(x) for part in parts], dim=1)
    assert torch.equal(together, alone)


def test_layers_share_memory_without_touching_each_other(native: LinearLibrary) -> None:
    memory = WeightMemory()
    weights = [random_weight(25, 64, name) for name in FORMATS]
    layers = [PackedLinear(weight, memory=memory, library=native) for weight in weights]
    x = random_rows(3, 64)
    for layer, weight in zip(layers, weights, strict=True):
        assert_agrees(layer(x), x, weight)


def test_what_does_not_fit_is_named(native: LinearLibrary) -> None:
    with pytest.raises(ValueError, match=r"'int5'; known: int8_channel"):
        quantize_weight(torch.zeros(2, 64), "int5")
    with pytest.raises(ValueError, match=r"96 inputs.*groups of 64"):
        quantize_weight(torch.zeros(2, 96), "int8_group64")
    with pytest.raises(ValueError, match="not finite or too large"):
        quantize_weight(torch.full((2, 64), 1e30), "int4_group32")
    with pytest.raises(ValueError, match="multiple of 20"):
        weight_from_blocks(torch.zeros(2, 19, dtype=torch.uint8), "Q4_1")
    with pytest.raises(ValueError, match=r"float32, bfloat16, float16 \[out, in\], not torch.int8"):
        PackedLinear(torch.zeros(2, 64, dtype=torch.int8), library=native)
    weight = random_weight(3, 64, "int8_group32")
    with pytest.raises(ValueError, match="even number of outputs, not 3"):
        PackedLinear(weight, gate="silu", library=native)
    with pytest.raises(ValueError, match=r"must be float32 \[3\]"):
        PackedLinear(weight, torch.zeros(4), library=native)
    layer = PackedLinear(weight, library=native)
    with pytest.raises(ValueError, match=r"float32 \[rows, 64\]"):
        layer(torch.zeros(2, 65))
    with pytest.raises(ValueError, match="contiguous rows"):
        layer(torch.zeros(64, 2).T)
    with pytest.raises(ValueError, match=r"float32 \[2, 3\]"):
        layer.add_to(torch.zeros(2, 4), torch.zeros(2, 64))


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.INSTRUCTION_SET_VARIABLE, raising=False)
    assert build.default_instruction_set() == "native"
    monkeypatch.setenv(build.INSTRUCTION_SET_VARIABLE, "avx2")
    assert build.built_library() == build.built_library("avx2")
    monkeypatch.setenv(build.INSTRUCTION_SET_VARIABLE, "avx3")
    with pytest.raises(ValueError, match="HEADRACE_CPU_ISA is 'avx3'; known: native, portable, avx2"):
        build.built_library()


def test_no_rows_give_no_rows(native: LinearLibrary) -> None:
    assert PackedLinear(random_weight(3, 64, "int8_group32"), library=native)(torch.zeros(0, 64)).shape == (
        0,
        3,
    )
