"""Embeddings of tiny random models: the vectors that transformers' hidden states give, text by text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.embedding_runner import EmbeddingRunner
from engine_service.loaders.embedding import load_embedder
from engine_service.models.encoder import of_like_length
from engine_service.served_embedder import make_card
from shared.config import ModelConfig, Pooling
from shared.errors import ConfigError, InvalidRequest
from shared.tokenizer import Tokenizer
from tests.gguf_files import write_gguf
from tests.models import EOS_TOKEN_ID, write_tiny_model

TEXTS = [
    torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 40, 16, 17, 7)
]
DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
ENCODER = {name: value for name, value in DECODER.items() if "key_value" not in name and name != "head_dim"}
# name -> (class of transformers, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder-with-head": ("Qwen3ForCausalLM", DECODER),
    "decoder-without-head": ("Qwen3Model", DECODER),
    "window": ("MistralModel", {**DECODER, "sliding_window": 11}),
    "both-ways": ("Gemma3TextModel", {**DECODER, "use_bidirectional_attention": True, "sliding_window": 12}),
    "encoder": ("BertModel", ENCODER),
    "encoder-with-head": ("BertForMaskedLM", ENCODER),
    "encoder-roberta": ("RobertaModel", {**ENCODER, "max_position_embeddings": 65}),
    "another-decoder": ("Olmo2ForCausalLM", DECODER),
}


def runner_for(path: Path, **changes: Any) -> EmbeddingRunner:
    fields = {"runner": "pooling", "max_num_batched_tokens": 48} | changes
    config = ModelConfig(name="tiny", source=str(path), **fields)
    return EmbeddingRunner(config, load_embedder(config))


@torch.inference_mode()
def expected(model: Any, pooling: Pooling) -> torch.Tensor:
    """One text at a time, as transformers computes it."""
    vectors = []
    for tokens in TEXTS:
        states = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
        vectors.append({"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling])
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, settings = MODELS[name]
    model = write_tiny_model(tmp_path, architecture, **settings)
    for pooling in ("mean", "last", "cls"):
        ours = runner_for(tmp_path, pooling=pooling).embed(TEXTS)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected(model, pooling), atol=1e-5, rtol=1e-4)


def test_a_gguf_file_gives_the_embeddings_of_its_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "Qwen3ForCausalLM", **DECODER)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json")
    runner = runner_for(tmp_path / "tiny.gguf")
    assert runner.pooling == "last"
    torch.testing.assert_close(runner.embed(TEXTS), expected(model, "last"), atol=1e-5, rtol=1e-4)


def test_an_end_token_that_the_files_ask_for_is_told_to_gateways(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "Qwen3ForCausalLM", **DECODER)

    def closing_token_id(source: Path) -> int | None:
        config = ModelConfig(name="tiny", source=str(source), runner="pooling")
        return load_embedder(config).text_bundle.closing_token_id

    assert closing_token_id(tmp_path) is None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_eos_token": True}))
    assert closing_token_id(tmp_path) == EOS_TOKEN_ID
    for adds_eos in (False, True):
        file = tmp_path / f"{adds_eos}.gguf"
        write_gguf(file, model, tmp_path / "tokenizer.json", adds_eos=adds_eos)
        assert closing_token_id(file) == (EOS_TOKEN_ID if adds_eos else None)


def test_a_vector_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "Qwen3Model", **DECODER)
    runner = runner_for(tmp_path, max_num_batched_tokens=1000)
    together, alone = runner.embed(TEXTS), torch.cat([runner.embed([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    assert runner.embed([]).shape == (0, 0)


@pytest.mark.parametrize(
    ("flags", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        (None, "mean"),
    ],
)
def test_the_pooling_that_a_directory_declares_is_taken(
    tmp_path: Path, flags: dict[str, bool] | None, pooling: str
) -> None:
    write_tiny_model(tmp_path, "BertModel", **ENCODER)
    if flags is not None:
        declare(tmp_path, flags, "Pooling", "Normalize")
    assert runner_for(tmp_path).pooling == pooling


def declare(path: Path, flags: dict[str, bool], *kinds: str) -> None:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))


@pytest.mark.parametrize(
    ("flags", "kinds", "complaint"),
    [
        ({"pooling_mode_max_tokens": True}, ["Pooling"], "pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ["Pooling"], "not supported"),
        ({"pooling_mode_mean_tokens": True}, ["Pooling", "Dense"], "Dense"),
    ],
)
def test_what_a_directory_declares_and_we_do_not_compute_is_refused(
    tmp_path: Path, flags: dict[str, bool], kinds: list[str], complaint: str
) -> None:
    write_tiny_model(tmp_path, "BertModel", **ENCODER)
    declare(tmp_path, flags, *kinds)
    with pytest.raises(ConfigError, match=complaint):
        runner_for(tmp_path)


def test_texts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    # 64 positions, of which the padding and what lies before it take two.
    write_tiny_model(tmp_path, "RobertaModel", **ENCODER, pad_token_id=1)
    runner = runner_for(tmp_path)
    assert runner.max_model_len == 62
    assert runner.embed([[5] * 62]).shape == (1, 64)
    wrong = [([], "0 tokens"), ([5] * 63, "1 to 62"), ([-1], "token ids"), ([9999], "token ids")]
    for text, complaint in wrong:
        with pytest.raises(InvalidRequest, match=complaint) as caught:
            runner.embed([[5], text])
        assert caught.value.param == "input[1]"
    with pytest.raises(ConfigError, match="62"):
        runner_for(tmp_path, max_model_len=63)


def test_a_directory_may_declare_shorter_texts_and_shorter_vectors(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "BertModel", **ENCODER)
    assert runner_for(tmp_path).max_model_len == 64
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": false}')
    assert runner_for(tmp_path).max_model_len == 20
    assert runner_for(tmp_path, max_model_len=64).max_model_len == 64

    settings = json.loads((tmp_path / "config.json").read_text())
    for declared, dimensions in (
        ({}, None),
        ({"is_matryoshka": True}, []),
        ({"matryoshka_dimensions": [16, 32]}, [16, 32]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | declared))
        loaded = load_embedder(ModelConfig(name="tiny", source=str(tmp_path), runner="pooling"))
        assert (loaded.architecture, loaded.matryoshka_dimensions) == ("BertModel", dimensions)


@pytest.mark.parametrize(
    ("declared", "configured", "allowed"),
    [
        (None, None, None),
        ([16], None, [16]),
        (None, True, []),
        ([16], True, [16]),
        ([16], False, None),
    ],
)
def test_the_configuration_overrules_what_the_files_say_of_shorter_vectors(
    declared: list[int] | None, configured: bool | None, allowed: list[int] | None
) -> None:
    config = ModelConfig(name="tiny", source="fake:", runner="pooling", is_matryoshka=configured)
    card = make_card(
        config,
        architecture="BertModel",
        vocab_size=300,
        max_model_len=64,
        embedding_dim=64,
        matryoshka_dimensions=declared,
    )
    assert card.matryoshka_dimensions == allowed


def test_texts_share_a_padded_batch_with_texts_of_like_length_only() -> None:
    lengths = [400, 8, 7, 300, 199, 3, 4, 1]
    groups = of_like_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(8))
    assert [[lengths[index] for index in group] for group in groups] == [
        [400, 300],
        [199],
        [8, 7, 4],
        [3],
        [1],
    ]


def test_vectors_that_are_not_normalised_are_the_models_own(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "BertModel", **ENCODER)
    raw, unit = runner_for(tmp_path, normalize=False).embed(TEXTS), runner_for(tmp_path).embed(TEXTS)
    assert (raw.norm(dim=-1) - 1).abs().min() > 0.1
    torch.testing.assert_close(raw / raw.norm(dim=-1, keepdim=True), unit, atol=1e-6, rtol=1e-5)


def test_missing_weights_and_foreign_kinds_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "bert", "BertModel", **ENCODER)
    settings = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="missing"):
        load_embedder(ModelConfig(name="tiny", source=str(tmp_path / "bert")))


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "BertModel", **ENCODER)
    bundle = load_embedder(ModelConfig(name="tiny", source=str(tmp_path))).text_bundle
    assert Tokenizer(bundle).encode("water")
