"""The C++ operators agree with the plain torch reference, and the dispatcher chooses well."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import build
from kernels.dispatch import BACK_ENDS, BackEndUnavailable, select_operators
from kernels.operators import Operators
from kernels.reference import ReferenceOperators

REFERENCE = ReferenceOperators()


@pytest.fixture(scope="module")
def cpu() -> Operators:
    return select_operators("cpu", "cpu", num_threads=2)


@pytest.mark.parametrize("width", [576, 33, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 100])
def test_norms(cpu: Operators, width: int, num_rows: int) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(num_rows, width) * 4, torch.randn(num_rows, width), torch.randn(width)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(
        cpu.add_rms_norm(x, ours, weight, 1e-5), REFERENCE.add_rms_norm(x, theirs, weight, 1e-5)
    )
    torch.testing.assert_close(ours, theirs)


def test_rotary_turns_only_the_heads_it_is_given(cpu: Operators) -> None:
    torch.manual_seed(0)
    angles = torch.rand(200, 32) * 100
    positions = torch.randint(0, 200, (37,))
    ours = torch.randn(37, (9 + 3 + 3) * 64)
    theirs = ours.clone()
    for operators, fused in ((cpu, ours), (REFERENCE, theirs)):
        query, key, _ = fused.split((9 * 64, 3 * 64, 3 * 64), dim=-1)
        operators.rotary(
            query.unflatten(-1, (9, 64)), key.unflatten(-1, (3, 64)), positions, angles.cos(), angles.sin()
        )
    torch.testing.assert_close(ours, theirs)


def test_rotary_of_a_part_of_the_dimensions_leaves_the_rest(cpu: Operators) -> None:
    torch.manual_seed(0)
    angles, positions = torch.rand(50, 6), torch.randint(0, 50, (9,))
    query, key = torch.randn(9, 4, 20), torch.randn(9, 2, 20)
    ours, theirs = (query.clone(), key.clone()), (query.clone(), key.clone())
    cpu.rotary(*ours, positions, angles.cos(), angles.sin())
    REFERENCE.rotary(*theirs, positions, angles.cos(), angles.sin())
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[0][..., 12:], query[..., 12:])
    assert not torch.equal(ours[1][..., 6:12], key[..., 6:12])


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates_saturate_without_overflow(cpu: Operators, name: str) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 2 * 77) * torch.tensor([[1.0], [60.0], [5.0], [0.01], [60.0]])
    gate_up[1, :4] = torch.tensor([-1e4, 1e4, -88.5, 88.5])
    # GELU is a difference of nearly equal numbers far below 0: 1e-6 absolute is float32 at work.
    torch.testing.assert_close(
        getattr(cpu, name)(gate_up), getattr(REFERENCE, name)(gate_up), rtol=1e-5, atol=1e-5
    )


def test_other_types_than_float32_go_to_the_reference(cpu: Operators) -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_a_norm_with_wide_weights_is_rounded_once() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), 1 + torch.randn(8) / 100
    normed = REFERENCE.rms_norm(x, weight, 1e-5)
    assert torch.equal(normed, REFERENCE.rms_norm(x.float(), weight, 1e-5).bfloat16())


def test_an_unknown_back_end_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="cpu, reference, triton"):
        select_operators("cuda", "cpu")
    assert set(BACK_ENDS) == {"cpu", "reference", "triton"}


def test_without_a_compiler_the_reference_runs_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "_FOLDER", tmp_path)  # where nothing was built before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        operators = select_operators(None, "cpu")
    assert operators.name == "reference"
    [warning] = [record.getMessage() for record in caplog.records]
    assert "no C++ compiler found" in warning
    assert "such as g++ 11" in warning, "it says how to get the fast path"
    with pytest.raises(BackEndUnavailable):
        select_operators("cpu", "cpu")


def test_a_failed_build_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(build, "_sources", lambda: [broken])
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    with pytest.raises(BackEndUnavailable, match="failed"):
        build.built_library()


def test_a_library_that_was_built_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = build.built_library()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.built_library() == library


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.999])
def test_a_library_that_was_cut_off_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: float
) -> None:
    (tmp_path / "small.cpp").write_text('extern "C" int two() { return 2; }')
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    library = build.built_library()
    os.truncate(library, int(kept * library.stat().st_size))
    assert build.built_library() == library
    assert ctypes.CDLL(str(library)).two() == 2


def test_a_compiler_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "no-compiler"
    compiler.write_bytes(b"\x7fELF and nothing else")
    compiler.chmod(0o755)
    (tmp_path / "small.cpp").write_text("")
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BackEndUnavailable, match="no-compiler does not run"):
        build.built_library()


def test_the_library_moves_to_the_user_cache_when_the_installation_is_read_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "installed" / "empty.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int nothing() { return 0; }')
    (source.parent / "build").write_text("a file where the folder would be: cannot be written to")
    monkeypatch.setattr(build, "_FOLDER", source.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = build.built_library()
    assert library.parent == tmp_path / "cache" / "headrace"
    assert build.built_library() == library


def test_our_folder_does_not_disturb_transformers() -> None:
    """transformers looks for a PyPI package that is also named `kernels`, and finds ours."""
    program = """
import kernels.dispatch, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1)
assert LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 32)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=120)


def test_triton_is_imported_only_when_chosen() -> None:
    program = (
        "import sys; from kernels.dispatch import select_operators;"
        "select_operators(None, 'cpu'); assert 'triton' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=60)
