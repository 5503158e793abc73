"""The second start of a model takes what the first one has packed, and never what does not fit any more."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.loaders.weight_cache import WeightCache
from engine_service.loaders.weight_file import read_header, read_weight_file, write_weight_file
from engine_service.model_runner import ModelRunner
from engine_service.model_source import resolve_source
from engine_service.models.weight_form import PackedForm, PackedStack, select_form
from engine_service.models.weights import DecoderWeights
from kernels.cpu.packed_linear import PackedWeight
from shared.config import ModelConfig
from shared.sampling import SamplingParams
from tests.gguf_files import write_gguf
from tests.hand_scheduling import make_sequence, run_to_end
from tests.models import write_tiny_llama, write_tiny_model

ROOT = Path(__file__).parents[2]
FOLDER = ".headrace-weights"
Kind = GGMLQuantizationType | Callable[[str], GGMLQuantizationType]


def write(folder: Path, *, seed: int = 0, kind: Kind = GGMLQuantizationType.Q4_1) -> Path:
    """A tiny Llama, as GGUF."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_tiny_llama(folder / "origin", seed=seed, attention_bias=True)
    tokenizer = folder / "origin" / "tokenizer.json"
    write_gguf(folder / "tiny.gguf", model, tokenizer, kind=kind)
    shutil.rmtree(folder / "origin")
    return folder / "tiny.gguf"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "weights"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def config_of(source: Path, **options: Any) -> ModelConfig:
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 16}
    return ModelConfig(name="tiny", source=str(source), **(settings | options))


def load(source: Path, **options: Any) -> LoadedModel:
    return load_model(config_of(source, **options))


def was_cached(log: pytest.LogCaptureFixture) -> bool:
    """Whether the last load was."""
    return "packed before" in [text for text in log.messages if text.startswith("loaded")][-1]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def answer_of(loaded: LoadedModel, source: Path, **options: Any) -> list[int]:
    runner = ModelRunner(config_of(source, **options), loaded, num_threads=1)
    params = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
    sequence = make_sequence(0, [5, 6, 7, 8, 9], params, num_blocks=8)
    run_to_end(runner, [sequence], num_tokens=8, chunk=16)
    return sequence.token_ids


def assert_same_parts(ours: Any, theirs: Any) -> None:
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(ours, tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_same_parts(one, other)
    elif isinstance(ours, PackedWeight) or hasattr(ours, "__dataclass_fields__"):
        assert type(ours) is type(theirs)
        for field in fields(ours):
            assert_same_parts(getattr(ours, field.name), getattr(theirs, field.name))
    else:
        assert ours == theirs


def test_the_second_load_gives_the_same_model(source: Path, log: pytest.LogCaptureFixture) -> None:
    first, second = load(source), load(source)
    assert was_cached(log)
    assert first.spec == second.spec
    assert first.text_bundle == second.text_bundle
    assert_same_parts(first.weights, second.weights)
    assert isinstance(second.weights, DecoderWeights)
    assert second.weights.head is second.weights.embedding
    assert answer_of(first, source) == answer_of(second, source)
    (file,) = files_in(source.parent / FOLDER)
    assert file.suffix == ".safetensors"


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
        (
            "Qwen3ForCausalLM",
            {
                "tie_word_embeddings": False,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
            },
        ),
    ],
)
def test_whatever_a_family_has_comes_back(
    tmp_path: Path, log: pytest.LogCaptureFixture, architecture: str, changes: dict[str, Any]
) -> None:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    write_tiny_model(tmp_path / "model", architecture, **(shape | changes))
    first, second = (load(tmp_path / "model", quantization="int8") for _ in range(2))
    assert was_cached(log)
    assert first.spec == second.spec
    assert_same_parts(first.weights, second.weights)
    (tmp_path / "model" / "chat_template.jinja").write_text("new")  # all files of a directory count
    assert load(tmp_path / "model", quantization="int8").text_bundle.chat_template == "new"
    assert not was_cached(log)


def test_another_content_is_packed_anew_and_takes_the_place(
    source: Path, log: pytest.LogCaptureFixture
) -> None:
    load(source)
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    other = write(source.parent.parent / "other", seed=1)
    shutil.copyfile(other, source)
    os.utime(source, ns=times)  # of the same size and time: only the inode tells
    assert_same_parts(load(source).weights, load(other).weights)
    assert len(files_in(source.parent / FOLDER)) == 1
    load(source)
    assert was_cached(log)


def test_the_same_content_in_another_file_is_recognised(source: Path, log: pytest.LogCaptureFixture) -> None:
    load(source)
    shutil.copyfile(source, source.with_suffix(".copy"))
    source.with_suffix(".copy").replace(source)
    load(source)
    assert was_cached(log)


@pytest.mark.parametrize("damage", ["cut", "flipped", "header", "empty", "foreign", "number", "deep"])
def test_a_damaged_file_is_warned_of_and_made_anew(
    source: Path, log: pytest.LogCaptureFixture, damage: str
) -> None:
    first = load(source)
    (file,) = files_in(source.parent / FOLDER)
    content = file.read_bytes()
    changed = bytearray(content)
    changed[-100] ^= 1
    file.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "flipped": bytes(changed),
            "header": content[:8] + b"\0" + content[9:],
            "empty": b"",
            "foreign": b"PK" * 5000,
            "number": (1).to_bytes(8, "little") + b"5",
            "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
        }[damage]
    )
    assert_same_parts(load(source).weights, first.weights)
    assert not was_cached(log)
    assert any("made anew" in record.message for record in log.records if record.levelname == "WARNING")
    load(source)
    assert was_cached(log)


def test_the_file_may_be_read_by_those_who_may_read_the_model(source: Path) -> None:
    source.chmod(0o640)
    load(source)
    (file,) = files_in(source.parent / FOLDER)
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_folder_that_cannot_be_written_leaves_the_users_cache(
    source: Path, user_cache: Path, log: pytest.LogCaptureFixture
) -> None:
    (source.parent / FOLDER).write_text("no folder")
    load(source)
    assert len(files_in(user_cache)) == 1
    load(source)
    assert was_cached(log)
    user_cache.parent.rename(user_cache.parent.with_name("gone"))
    user_cache.parent.write_text("no folder, either")
    load(source)  # nothing can be kept, and nothing is wrong
    assert not was_cached(log)


def test_models_of_one_name_do_not_share_a_file(
    tmp_path: Path, user_cache: Path, log: pytest.LogCaptureFixture
) -> None:
    sources = [write(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    for source in sources:
        (source.parent / FOLDER).write_text("no folder")
        load(source)
    assert len(files_in(user_cache)) == 2
    for source in sources:
        load(source)
        assert was_cached(log)


def test_what_is_switched_off_or_not_quantised_leaves_no_file(
    tmp_path: Path, source: Path, user_cache: Path
) -> None:
    load(source, weight_cache=False)
    load(source, quantization="none")
    load(write(tmp_path / "half", kind=GGMLQuantizationType.F16))
    write_tiny_llama(tmp_path / "floats")
    load(tmp_path / "floats")
    for folder in (source.parent, tmp_path / "half", tmp_path / "floats"):
        assert not (folder / FOLDER).exists()
    assert not user_cache.exists()


def test_no_quantization_does_not_take_what_was_kept_in_blocks(
    source: Path, log: pytest.LogCaptureFixture
) -> None:
    load(source)
    weights = load(source, quantization="none").weights
    assert not was_cached(log)
    assert isinstance(weights, DecoderWeights)
    assert isinstance(weights.head, PackedWeight)
    assert weights.head.format.name == "float32"


def test_several_formats_in_a_layer_come_back(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    f16, q4_1 = GGMLQuantizationType.F16, GGMLQuantizationType.Q4_1
    kinds = {"ffn_down": f16, "attn_v": GGMLQuantizationType.Q8_0}
    source = write(tmp_path / "model", kind=lambda name: kinds.get(name.rpartition(".")[2], q4_1))
    first, second = load(source), load(source)
    assert was_cached(log)
    assert_same_parts(first.weights, second.weights)
    assert answer_of(first, source) == answer_of(second, source)
    assert isinstance(second.weights, DecoderWeights)
    layer = second.weights.layers[0]
    assert isinstance(layer.qkv, PackedStack)
    assert [part.format.name for part in layer.qkv.parts] == ["int4_group32", "int8_group32"]
    assert isinstance(layer.down, PackedWeight)
    assert layer.down.format.name == "float32"


def test_two_forms_of_a_model_have_a_file_each(source: Path, log: pytest.LogCaptureFixture) -> None:
    for quantization in (None, "int8"):
        load(source, quantization=quantization)
        assert not was_cached(log)
    for quantization in (None, "int8"):
        load(source, quantization=quantization)
        assert was_cached(log)
    assert len(files_in(source.parent / FOLDER)) == 2


def test_files_of_older_code_go_and_those_of_other_machines_and_instruction_sets_stay(source: Path) -> None:
    load(source)
    folder = source.parent / FOLDER
    (file,) = files_in(folder)
    layout = file.stem.rpartition("-")[2]
    header = read_header(file)
    tensors = read_weight_file(file, header)
    record = header.record
    older = {"key": record["key"] | {"code": "older"}}
    other = {"key": record["key"] | {"layout": "other"}}
    for name, changed in {
        "older": older,
        "foreign": older | {"cpu": "another processor"},
        "other": other,  # as another HEADRACE_CPU_ISA makes it
    }.items():
        write_weight_file(file.with_name(file.name.replace(layout, name)), record | changed, tensors)
    unreadable = file.with_name(file.name.replace(layout, "unreadable"))
    unreadable.write_bytes(b"")
    unrelated = folder / "notes.safetensors"
    unrelated.write_bytes(b"")
    scrap = [folder / f".{file.name}.{age}.tmp" for age in ("old", "new")]
    for path in scrap:
        path.write_bytes(b"half")
    os.utime(scrap[0], (0, 0))
    file.unlink()
    load(source)
    left = {
        path.name.replace(file.name.removesuffix(f"{layout}.safetensors"), "") for path in files_in(folder)
    }
    assert left == {
        f"{layout}.safetensors",
        "foreign.safetensors",
        "other.safetensors",
        "notes.safetensors",
        scrap[1].name.replace(file.name.removesuffix(f"{layout}.safetensors"), ""),
    }


def test_a_later_start_removes_what_a_killed_one_left(source: Path) -> None:
    load(source)
    (file,) = files_in(source.parent / FOLDER)
    scrap = file.with_name(f".{file.name}.killed.tmp")
    scrap.write_bytes(b"half")
    load(source)
    assert scrap.exists(), "somebody may still be writing it"
    os.utime(scrap, (0, 0))
    load(source)
    assert files_in(source.parent / FOLDER) == [file]


def test_a_file_of_other_code_is_not_used(source: Path, log: pytest.LogCaptureFixture) -> None:
    load(source)
    (file,) = files_in(source.parent / FOLDER)
    header = read_header(file)
    record = header.record | {"key": header.record["key"] | {"code": "older"}}
    write_weight_file(file, record, read_weight_file(file, header))
    load(source)
    assert not was_cached(log)


def test_many_may_write_and_read_at_once(source: Path) -> None:
    form = select_form(config_of(source), 1)
    assert isinstance(form, PackedForm)
    caches = [WeightCache(resolve_source(str(source)), form) for _ in range(4)]
    loaded = load(source, weight_cache=False)
    caches[0].store(loaded)

    def write_and_read(cache: WeightCache) -> None:
        for _ in range(10):
            cache.store(loaded)
            found = cache.load()
            assert found is not None
            assert_same_parts(found.weights, loaded.weights)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write_and_read, caches))
    assert len(files_in(source.parent / FOLDER)) == 1


_LOAD = """
import sys
from engine_service.loaders.load import load_model
from shared.config import ModelConfig
print("ready", flush=True)
sys.stdin.readline()
load_model(ModelConfig(name="tiny", source=sys.argv[1]))
"""


def test_two_processes_that_start_at_once_leave_one_whole_file(
    source: Path, log: pytest.LogCaptureFixture
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, str(source)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len(files_in(source.parent / FOLDER)) == 1
    load(source)
    assert was_cached(log)
