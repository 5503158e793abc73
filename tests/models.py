"""Tiny models with random weights: complete directories, as Hugging Face writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
_BERT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_CORPUS = (
    "the quick brown fox jumps over the lazy dog while water falls from the headrace to the turbine",
    "a model serves many requests at once, and each of them gets the tokens that it would get alone",
)


def write_tokenizer(path: Path, *, vocab_size: int = 320) -> int:
    """Byte-level BPE with three special tokens, ids 0 to 2. Returns the number of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def write_tiny_llama(
    path: Path, *, seed: int = 0, architecture: str = "llama", shard_size: str = "5GB", **changes: Any
) -> Any:
    """A 2-layer model of 64 dimensions, 4 query and 2 KV heads, in float32. Returns transformers' model.

    `changes` go to the transformers configuration. The weights are drawn wider than transformers does,
    so that the largest logits stand apart and greedy outputs are not ties.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(path)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[architecture]
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    return _save_random(path, model_class(config_class(**(settings | changes))), seed, shard_size)


def write_tiny_model(path: Path, architecture: str, *, seed: int = 0, **settings: Any) -> Any:
    """Any class of transformers, by name, as `write_tiny_llama` does it; all settings are the caller's."""
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, architecture)
    tokens = {"bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}
    config = model_class.config_class(**({"vocab_size": write_tokenizer(path)} | tokens | settings))
    return _save_random(path, model_class._from_config(config, attn_implementation="eager"), seed, "5GB")


def write_tiny_bert(path: Path) -> Any:
    """An embedding model, with special tokens around a text. Its tokenizer file also asks to cut and to fill
    up, as many do. Returns transformers' model.
    """
    model = write_tiny_model(path, "BertModel", **_BERT)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=30)
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def _save_random(path: Path, model: Any, seed: int, shard_size: str) -> Any:
    torch.manual_seed(seed)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model
