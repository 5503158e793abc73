"""A tiny random model of each family: the logits that transformers gives, for every way to compute them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine_service.loaders.gguf import read_spec, read_tensors
from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.huggingface import load_huggingface
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_runner import ModelRunner
from engine_service.models.decoder import DecoderModel
from engine_service.models.decoder_config import read_decoder_spec
from engine_service.models.families import FAMILIES
from engine_service.models.spec import DecoderSpec
from engine_service.models.transformers_module import AttentionCall, PagedStep
from engine_service.models.weight_form import FloatForm
from engine_service.sequence import Sequence
from shared.config import ModelConfig, Quantization
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.gguf_files import write_gguf
from tests.hand_scheduling import make_sequence, run_to_end
from tests.models import write_tiny_model

TOLERANCE = 1e-3  # of the range of the logits; what we see is about 1e-6
NUM_TOKENS = 4
PROMPT_LENS = (50, 1, 17, 33)
MAX_LEN = 64

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}
WINDOW = 11  # less than most prompts, not a multiple of the page


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    **rope(
        "longrope",
        short_factor=[1.0 + i / 4 for i in range(6)],
        long_factor=[2.0 + i for i in range(6)],
        partial_rotary_factor=0.75,
    ),
}
GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 30,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}

DEEPSEEK = MOE | {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

# name -> (class of transformers, what differs from SHAPE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": ("LlamaForCausalLM", rope("linear", factor=4.0)),
    "llama-dynamic": ("LlamaForCausalLM", rope("dynamic", factor=2.0)),
    "llama-yarn": ("LlamaForCausalLM", YARN),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2),
    ),
    "llama-llama3": (
        "LlamaForCausalLM",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "smollm2": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_attention_heads": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window-1": ("MistralForCausalLM", {"sliding_window": 1}),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3ForCausalLM", {"head_dim": 24, **YARN}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 6, "norm_topk_prob": True, "head_dim": 16, "mlp_only_layers": [1], **MOE},
    ),
    "qwen3-moe-raw-weights": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "norm_topk_prob": False, "head_dim": 16, "decoder_sparse_step": 2, **MOE},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 3}),
    "smollm3-window": (
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "phi3-partial-rotary": ("Phi3ForCausalLM", rope("default", partial_rotary_factor=0.5)),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma2-untied": ("Gemma2ForCausalLM", {**GEMMA, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "sliding_window_pattern": 3}),
    "gemma3-scaled": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "granite": ("GraniteForCausalLM", GRANITE),
}

# name -> (class, what differs from SHAPE, max_model_len): what a GGUF file can say
GGUF: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", {}, MAX_LEN),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}, MAX_LEN),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, MAX_LEN),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}, MAX_LEN),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": WINDOW, **LONGROPE}, 32),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 24}, MAX_LEN),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}, MAX_LEN),
}

# Not declared by us: transformers' own modules with our attention.
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoXForCausalLM", {"num_key_value_heads": None}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    "cohere": ("CohereForCausalLM", {"tie_word_embeddings": True}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_LEN}),
    "granite-moe": ("GraniteMoeForCausalLM", {"num_local_experts": 4}),
}


def write(path: Path, architecture: str, changes: dict[str, Any]) -> Any:
    return write_tiny_model(path, architecture, **(SHAPE | changes))


def load(path: Path, **changes: Any) -> LoadedModel:
    return load_model(ModelConfig(name="tiny", source=str(path), **changes))


def run(
    loaded: LoadedModel,
    *,
    chunk: int,
    back_end: str | None = None,
    prompt_lens: tuple[int, ...] = PROMPT_LENS,
    is_native: bool = True,
    **changes: Any,
) -> list[tuple[Sequence, torch.Tensor]]:
    """All prompts in one batch, greedily; the logits that gave each output token, `[NUM_TOKENS, vocab]`."""
    settings = {
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 40,
        "max_model_len": MAX_LEN,
        "kv_cache_dtype": "float32",
    } | changes
    config = ModelConfig(name="tiny", source="unused", **settings)
    runner = ModelRunner(config, loaded, num_threads=2, back_end=back_end)
    if not is_native:
        assert isinstance(runner._model, DecoderModel)
        assert runner._model._native is not None, "there is something to compare with"
        runner._model._native = None
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in prompt_lens]
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0)
    sequences = [make_sequence(i, prompt, params, num_blocks=8) for i, prompt in enumerate(prompts)]
    seen: dict[str, list[torch.Tensor]] = {sequence.request_id: [] for sequence in sequences}
    sample: Callable[..., list[int]] = runner._sampler.sample

    def keep_and_sample(logits: torch.Tensor, sampled: list[Sequence], *rest: Any) -> list[int]:
        for sequence, row in zip(sampled, logits, strict=True):
            seen[sequence.request_id].append(row.clone())
        return sample(logits, sampled, *rest)

    runner._sampler.sample = keep_and_sample  # type: ignore[method-assign]
    run_to_end(runner, sequences, num_tokens=NUM_TOKENS, chunk=chunk)
    return [(sequence, torch.stack(seen[sequence.request_id])) for sequence in sequences]


@torch.inference_mode()
def error_of(model: Any, results: list[tuple[Sequence, torch.Tensor]]) -> float:
    """Largest difference from transformers' logits, each sequence alone and whole; of the logits' range."""
    worst = 0.0
    for sequence, logits in results:
        expected = model(torch.tensor([sequence.token_ids[:-1]])).logits[0, sequence.num_prompt_tokens - 1 :]
        error = float((logits - expected).abs().max() / (expected.max() - expected.min()))
        assert error == error, "not a number"
        worst = max(worst, error)
    return worst


def check(model: Any, loaded: LoadedModel, **changes: Any) -> None:
    """Whole prompts, chunks and single tokens beside each other, both back ends."""
    for chunk, back_end in ((MAX_LEN, "cpu"), (7, "cpu"), (7, "reference"), (1, "cpu")):
        error = error_of(model, run(loaded, chunk=chunk, back_end=back_end, **changes))
        print(f"chunk {chunk}, {back_end}: {error:.1e}")
        assert error < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_family_of_ours_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, changes = MODELS[name]
    model = write(tmp_path, architecture, changes)
    loaded = load(tmp_path)
    assert isinstance(loaded.spec, DecoderSpec)
    check(model, loaded)
    unpacked = load_huggingface(tmp_path, FloatForm(torch.float32))  # as without a compiler
    assert error_of(model, run(unpacked, chunk=7, back_end="reference")) < TOLERANCE


@pytest.mark.parametrize("quantization", [None, "int8"], ids=["floats", "int8"])
@pytest.mark.parametrize("name", [name for name in MODELS if "moe" not in name and name != "mixtral"])
def test_whole_steps_in_cpp_are_what_the_operators_compute_one_by_one(
    tmp_path: Path, name: str, quantization: Quantization | None
) -> None:
    architecture, changes = MODELS[name]
    write(tmp_path, architecture, changes)
    loaded = load(tmp_path, quantization=quantization)
    for chunk in (MAX_LEN, 7, 1):
        whole, apart = (run(loaded, chunk=chunk, is_native=is_native) for is_native in (True, False))
        for (sequence, logits), (same, expected) in zip(whole, apart, strict=True):
            assert sequence.token_ids == same.token_ids
            assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("max_model_len", "prompt_lens"), [(MAX_LEN, (50, 33)), (32, (28, 1, 17))], ids=["long", "short"]
)
def test_longrope_is_what_transformers_uses_on_this_side_of_the_original_length(
    tmp_path: Path, max_model_len: int, prompt_lens: tuple[int, ...]
) -> None:
    model = write(tmp_path, "Phi3ForCausalLM", LONGROPE)
    check(model, load(tmp_path), max_model_len=max_model_len, prompt_lens=prompt_lens)


def test_dynamic_scaling_past_the_trained_length_is_that_of_max_model_len(tmp_path: Path) -> None:
    model = write(tmp_path, "LlamaForCausalLM", rope("dynamic", factor=2.0))
    loaded = load(tmp_path)
    assert (loaded.spec.context_len, loaded.spec.extended_context_len) == (MAX_LEN, 2 * MAX_LEN)
    full = 2 * MAX_LEN - NUM_TOKENS + 1  # so that transformers, too, sees max_model_len tokens
    check(model, loaded, max_model_len=2 * MAX_LEN, prompt_lens=(full,))


def test_the_text_part_of_a_model_that_sees_images(tmp_path: Path) -> None:
    write(tmp_path, "Gemma3ForCausalLM", {**GEMMA, "vocab_size": 320})
    text = json.loads((tmp_path / "config.json").read_text())
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = write_tiny_model(
        tmp_path,
        "Gemma3ForConditionalGeneration",
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        tie_word_embeddings=True,
        mm_tokens_per_image=4,
    )
    loaded = load(tmp_path)
    assert isinstance(loaded.spec, DecoderSpec)
    check(model, loaded)


def test_every_family_has_a_model_here() -> None:
    shown = {architecture for architecture, _ in MODELS.values()}
    assert set(FAMILIES) - shown == {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_what_a_configuration_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    import transformers

    least = {**SHAPE, "vocab_size": 320, "num_hidden_layers": 8}
    config_class = getattr(transformers, architecture).config_class
    if architecture == "Gemma3ForConditionalGeneration":
        least = {"text_config": least}
    whole = config_class(**least).to_dict()
    assert read_decoder_spec(least, architecture) == read_decoder_spec(whole, architecture)


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        (
            "LlamaForCausalLM",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            },
        ),
        (
            "Gemma3ForCausalLM",
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                }
            },
        ),
    ],
)
def test_both_spellings_of_rotary_parameters_mean_the_same(
    architecture: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    least = {**SHAPE, "vocab_size": 320, "num_hidden_layers": 8}
    assert read_decoder_spec(least | old, architecture) == read_decoder_spec(least | new, architecture)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "granite", "phi3"])
def test_eight_bit_weights_stay_near(tmp_path: Path, name: str) -> None:
    architecture, changes = MODELS[name]
    model = write(tmp_path, architecture, changes)
    error = error_of(model, run(load(tmp_path, quantization="int8"), chunk=7))
    print(f"{error:.1e}")
    assert 1e-5 < error < 0.1  # not nothing: else the matrices were not quantised


def test_with_eight_bit_weights_a_sequence_alone_gets_the_same_logits_as_in_a_batch(tmp_path: Path) -> None:
    architecture, changes = MODELS["llama"]
    write(tmp_path, architecture, changes)
    loaded = load(tmp_path, quantization="int8")
    (in_company, logits), *_ = run(loaded, chunk=7)
    ((alone, logits_alone),) = run(loaded, chunk=7, prompt_lens=PROMPT_LENS[:1])
    assert alone.token_ids == in_company.token_ids
    assert torch.equal(logits_alone, logits)


def test_a_module_of_transformers_cannot_be_quantised(tmp_path: Path) -> None:
    architecture, changes = FOREIGN["olmo2"]
    write(tmp_path, architecture, changes)
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM runs as transformers' own module") as caught:
        load(tmp_path, quantization="int8")
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "granite", "phi3"])
def test_half_precision_stays_near(tmp_path: Path, name: str) -> None:
    architecture, changes = MODELS[name]
    model = write(tmp_path, architecture, changes)
    loaded = load(tmp_path, dtype="bfloat16")
    assert error_of(model, run(loaded, chunk=7, dtype="bfloat16", prompt_lens=(17,))) < 0.15


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path: Path, name: str) -> None:
    architecture, changes, max_model_len = GGUF[name]
    model = write(tmp_path, architecture, changes)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json")
    loaded = load(tmp_path / "tiny.gguf")
    assert isinstance(loaded.spec, DecoderSpec)
    eps = model.config.rms_norm_eps  # the file holds it in float32
    assert replace(loaded.spec, rms_norm_eps=eps) == load(tmp_path).spec
    lens = tuple(length for length in PROMPT_LENS if length + NUM_TOKENS <= max_model_len)
    assert error_of(model, run(loaded, chunk=7, max_model_len=max_model_len, prompt_lens=lens)) < TOLERANCE


def test_a_gguf_file_with_a_window_that_its_layers_are_not_told_is_refused(tmp_path: Path) -> None:
    architecture, changes = MODELS["qwen2-window"]
    model = write(tmp_path, architecture, changes)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="sliding window"):
        load(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kinds", ["Q4_1 Q4_1 Q8_0", "Q4_1 F16 Q4_1", "F16 Q4_1 Q8_0", "Q4_K Q4_K Q6_K"])
def test_whole_steps_in_cpp_take_q_k_and_v_of_several_formats(tmp_path: Path, kinds: str) -> None:
    of = {f"blk.1.attn_{part}": kind for part, kind in zip("qkv", kinds.split(), strict=True)}
    model = write(tmp_path, "Qwen2ForCausalLM", {"head_dim": 24, "hidden_size": 256})  # which has biases
    write_gguf(
        tmp_path / "tiny.gguf",
        model,
        tmp_path / "tokenizer.json",
        kind=lambda name: GGMLQuantizationType[of.get(name, "Q4_1")],
    )
    loaded, dequantized = (load(tmp_path / "tiny.gguf", quantization=each) for each in (None, "none"))
    for chunk in (MAX_LEN, 7, 1):
        whole, apart, floats = (
            run(of_form, chunk=chunk, is_native=is_native, activation_dtype="int16")
            for of_form, is_native in ((loaded, True), (loaded, False), (dequantized, True))
        )
        for (_, logits), (_, same), (_, expected) in zip(whole, apart, floats, strict=True):
            assert torch.equal(logits, same)
            # The first one's: a token that follows may be another one.
            spread = float(expected[0].max() - expected[0].min())
            torch.testing.assert_close(logits[0], expected[0], rtol=0, atol=TOLERANCE * spread)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_tensors_of_a_gguf_file_are_those_that_transformers_reads(tmp_path: Path, name: str) -> None:
    """transformers takes no phi3 file with longrope; the others' tensors are the same to the last bit."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    architecture, changes, _ = GGUF[name]
    model = write(tmp_path, architecture, changes)
    write_gguf(tmp_path / "tiny.gguf", model, tmp_path / "tokenizer.json")
    theirs = load_gguf_checkpoint(str(tmp_path / "tiny.gguf"), return_tensors=True, model_to_load=model)
    with GgufFile(tmp_path / "tiny.gguf") as file:
        ours = dict(read_tensors(file, read_spec(file)))
    assert ours.keys() == theirs["tensors"].keys()
    assert all(torch.equal(tensor, torch.as_tensor(theirs["tensors"][key])) for key, tensor in ours.items())


@pytest.mark.parametrize("name", FOREIGN)
def test_another_decoder_runs_as_the_module_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, changes = FOREIGN[name]
    assert architecture not in FAMILIES
    model = write(tmp_path, architecture, changes)
    loaded = load(tmp_path)
    assert not isinstance(loaded.spec, DecoderSpec)
    assert loaded.weights.num_bytes > 100_000
    check(model, loaded)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("StableLmForCausalLM", {}, "does not take attention functions"),
        ("GPTNeoXForCausalLM", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("GPTNeoXForCausalLM", {"sliding_window": 11}, "do not tell"),
        ("MambaForCausalLM", {}, "does not take attention functions"),
        ("NemotronForCausalLM", {}, "does not hand keyword arguments on"),
        ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        ("DiffLlamaForCausalLM", {}, "6 attention calls"),
        ("DeepseekV3ForCausalLM", DEEPSEEK, "values of another shape"),
    ],
)
def test_what_the_module_of_transformers_would_get_wrong_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    write(tmp_path, architecture, changes)
    with pytest.raises(ConfigError, match=f"known: .*LlamaForCausalLM.*was tried: .*{reason}") as caught:
        load(tmp_path)
    print(caught.value)
    assert caught.value.param == "source"


def test_a_module_with_missing_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "Olmo2ForCausalLM", {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"tensors are missing"):
        load(tmp_path)


def test_a_module_that_goes_wrong_with_our_attention_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "Olmo2ForCausalLM", {})

    def without_scale(step: PagedStep, call: AttentionCall) -> torch.Tensor:
        keys, values = step.kv_cache.keys[call.layer], step.kv_cache.values[call.layer]
        step.operators.write_kv(call.key, call.value, keys, values, step.metadata.slot_mapping)
        return step.operators.paged_attention(call.query, keys, values, step.metadata, 1.0)

    monkeypatch.setattr(PagedStep, "attend", without_scale)
    with pytest.raises(ConfigError, match=r"logits change by \d+"):
        load(tmp_path)


@pytest.mark.parametrize(("architecture", "changes"), [MODELS["mixtral"], MODELS["qwen3-moe"]])
def test_more_experts_per_token_than_there_are_is_refused(architecture: str, changes: dict[str, Any]) -> None:
    least = {**SHAPE, "vocab_size": 320, **changes, "num_experts_per_tok": 9}
    with pytest.raises(ConfigError, match=r"9 of \d experts"):
        read_decoder_spec(least, architecture)
