"""The same tokens and logits as transformers, on real and on random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.loaders.gguf import load_gguf
from engine_service.loaders.load import load_model
from engine_service.loaders.loaded_model import LoadedModel
from engine_service.model_runner import ModelRunner
from engine_service.model_source import resolve_source
from engine_service.models.weight_form import FloatForm
from shared.config import DEFAULT_MODEL_SOURCE, ModelConfig, default_model
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer
from tests.hand_scheduling import make_sequence, run_to_end
from tests.models import write_tiny_llama

TIE = 1e-4  # top two logits nearer than this: rounding may choose either
NUM_TOKENS = 32
BLOCKS_PER_SEQUENCE = 16
PROMPTS = (
    "What is gravity?",
    "Write a short poem about a river that turns a mill.",
    "List three uses of copper and explain each of them in one sentence.",
    "Hello!",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(default_model())


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)


@torch.inference_mode()
def count_ties(model: Any, prompt: list[int], output: list[int]) -> int:
    """Asserts that `output` is transformers' own greedy continuation of `prompt`.

    Token i is right if it has the largest logit after prompt and output[:i]; by induction the whole
    output is then what step-by-step generation gives. Returns how many tokens were right only because
    their logit came within TIE of the largest.
    """
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    behind = logits.amax(-1) - chosen
    for position in (behind >= TIE).nonzero().flatten().tolist():
        raise AssertionError(f"token {position} is {float(behind[position])} behind the largest logit")
    return int((behind > 0).sum())


@pytest.mark.parametrize(("back_end", "chunk"), [("cpu", 512), ("cpu", 7), ("reference", 512)])
def test_a_batch_gets_the_tokens_that_transformers_gives_each_prompt_alone(
    loaded: LoadedModel, transformers_model: Any, back_end: str, chunk: int
) -> None:
    tokenizer = Tokenizer(loaded.text_bundle)
    config = default_model().model_copy(
        update={
            "num_gpu_blocks_override": 128,
            "max_model_len": BLOCKS_PER_SEQUENCE * 16,
            "activation_dtype": "int16",
        }
    )
    runner = ModelRunner(config, loaded, num_threads=2, back_end=back_end)
    sequences = [
        make_sequence(
            index,
            tokenizer.encode_chat([{"role": "user", "content": prompt}]),
            greedy(NUM_TOKENS),
            num_blocks=BLOCKS_PER_SEQUENCE,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    run_to_end(runner, sequences, num_tokens=NUM_TOKENS, chunk=chunk)
    num_ties = 0
    for sequence in sequences:
        prompt_end = sequence.num_prompt_tokens
        num_ties += count_ties(
            transformers_model, sequence.token_ids[:prompt_end], sequence.token_ids[prompt_end:]
        )
    print(f"{num_ties} of {len(PROMPTS) * NUM_TOKENS} tokens decided by less than {TIE}")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "shard_size": "40KB"},
        {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True},
        {"architecture": "qwen2", "num_key_value_heads": 4},
        {
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ],
    ids=["tied", "untied-sharded", "one-kv-head-biases", "qwen2", "llama3-rope", "linear-rope"],
)
def test_logits_of_a_random_model_equal_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = write_tiny_llama(tmp_path, **changes)
    if "shard_size" in changes:
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = ModelConfig(
        name="tiny",
        source=str(tmp_path),
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        kv_cache_dtype="float32",
    )
    runner = ModelRunner(config, load_model(config), num_threads=1)
    seen: list[torch.Tensor] = []
    keep_logits(runner, seen)
    prompt = torch.randint(
        3, model.config.vocab_size, (50,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    sequence = make_sequence(0, prompt, greedy(8), num_blocks=8)
    run_to_end(runner, [sequence], num_tokens=8, chunk=13)
    with torch.inference_mode():
        expected = model(torch.tensor([sequence.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    ours = torch.cat([logits for logits in seen if len(logits)])
    error = (ours - expected).abs().max() / expected.abs().max()
    print(f"largest error {error:.1e} of the largest logit")
    assert error < 1e-5


def keep_logits(runner: ModelRunner, seen: list[torch.Tensor]) -> None:
    """Copies the logits of every step into `seen` on their way to the sampler."""
    sample = runner._sampler.sample

    def copy_and_sample(logits: torch.Tensor, sequences: Any) -> list[int]:
        seen.append(logits.clone())
        return sample(logits, sequences)

    runner._sampler.sample = copy_and_sample  # type: ignore[method-assign]


def test_weights_of_a_gguf_file_equal_those_that_transformers_reads(transformers_model: Any) -> None:
    loaded = load_gguf(resolve_source(DEFAULT_MODEL_SOURCE).path, FloatForm(torch.float32))
    state = transformers_model.state_dict()
    spec = loaded.spec
    for index in (0, spec.num_layers - 1):
        attention = f"model.layers.{index}.self_attn"
        qkv = torch.cat([state[f"{attention}.{part}_proj.weight"] for part in "qkv"])
        assert torch.allclose(loaded.weights.layers[index].qkv, qkv, atol=1e-6)
        assert torch.allclose(
            loaded.weights.layers[index].down, state[f"model.layers.{index}.mlp.down_proj.weight"], atol=1e-6
        )
    assert torch.allclose(loaded.weights.embedding, state["model.embed_tokens.weight"], atol=1e-6)


def test_the_tokenizer_of_a_gguf_file_equals_the_one_that_transformers_reads(loaded: LoadedModel) -> None:
    from transformers import AutoTokenizer

    path = resolve_source(DEFAULT_MODEL_SOURCE).path
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = Tokenizer(loaded.text_bundle)
    for text in (
        *PROMPTS,
        "Prices: 1234.50 and 7e9;\n\n\tdef f(x):\n    return x  # ok",
        "naïve 日本語 emoji 🙂🙂 we're they'll",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
