"""The tokenizer and chat template of a GGUF file, as a text bundle."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine_service.loaders.gguf_file import GgufFile
from shared.errors import ConfigError
from shared.text_bundle import TextBundle

_LOG = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Split patterns as the models' own tokenizer.json files have them.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# tokenizer.ggml.pre -> how text is cut before byte-pair merging
_SPLITS: Mapping[str, str] = MappingProxyType(
    {
        "gpt-2": "gpt2",
        "gpt2": "gpt2",
        "default": "gpt2",
        "smollm": "digits",
        "starcoder": "digits",
        "refact": "digits",
        "llama-bpe": "llama3",
        "llama3": "llama3",
        "llama-v3": "llama3",
        "qwen2": "qwen2",
        "deepseek-r1-qwen": "qwen2",
    }
)


def read_text_bundle(file: GgufFile) -> TextBundle:
    """Raises ConfigError if the file has no tokenizer, or one of a kind we cannot build."""
    kind = file.require("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer_json, adds_bos = _byte_level_bpe(file).to_str(), _split_of(file) == "llama3"
    elif kind == "llama":
        tokenizer_json, adds_bos = _sentencepiece(file.path), True
    else:
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported; known: gpt2, llama", "source")
    said = file.get("tokenizer.ggml.add_bos_token", bool)
    return TextBundle(
        tokenizer_json=tokenizer_json.encode(),
        chat_template=file.get("tokenizer.chat_template", str),
        special_tokens=_special_tokens(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        eos_token_ids=_eos_token_ids(file),
        adds_bos=adds_bos if said is None else said,
        closing_token_id=(
            file.get("tokenizer.ggml.eos_token_id", int)
            if file.get("tokenizer.ggml.add_eos_token", bool)
            else None
        ),
    )


def _byte_level_bpe(file: GgufFile) -> Tokenizer:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    merges: list[str] = file.require("tokenizer.ggml.merges", list)
    split = _split_of(file)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            # Neither half holds a space: in this alphabet a space is written as another character.
            merges=[_pair(merge) for merge in merges],
            ignore_merges=split == "llama3",
        )
    )
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list) or []
    # Same strings as in the vocabulary, so they keep their ids.
    tokenizer.add_special_tokens(_added(tokens, kinds, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, kinds, _USER_DEFINED, special=False))
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added(tokens: list[str], kinds: list[int], wanted: int, *, special: bool) -> list[Any]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind == wanted
    ]


def _split_of(file: GgufFile) -> str:
    name = file.get("tokenizer.ggml.pre", str) or "default"
    if name not in _SPLITS:
        _LOG.warning(
            "pre-tokenizer %r is unknown, text is cut as for gpt-2; known: %s",
            name,
            ", ".join(sorted(_SPLITS)),
        )
        return "gpt2"
    return _SPLITS[name]


def _pre_tokenizer(split: str) -> Any:
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "digits":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    pattern = _LLAMA3_SPLIT if split == "llama3" else _QWEN2_SPLIT
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(path: Path) -> str:
    from transformers import AutoTokenizer  # takes seconds to import; only these models need it

    converted = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    text: str = converted.backend_tokenizer.to_str()
    return text


def _special_tokens(file: GgufFile) -> dict[str, str]:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in keys.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}


def _eos_token_ids(file: GgufFile) -> list[int]:
    """End of text, of turn and of message: each ends a generation."""
    ids = (file.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom"))
    return sorted({index for index in ids if index is not None})
