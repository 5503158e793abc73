"""The tokenizer and chat template of a Hugging Face directory, as a text bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine_service.loaders.json_file import read_json
from shared.errors import ConfigError
from shared.text_bundle import TextBundle

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_text_bundle(path: Path, config: Mapping[str, Any]) -> TextBundle:
    """`config` is the content of config.json. Raises ConfigError if no tokenizer can be read."""
    tokenizer_json = _tokenizer_json(path)
    settings = _optional_json(path / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # tokenizers raises bare Exception for anything malformed
        raise ConfigError(f"{path / 'tokenizer.json'} is not readable: {error}", "source") from error
    special_tokens = {
        name: text for name in _TEMPLATE_TOKENS if (text := _token_text(settings.get(name))) is not None
    }
    bos_token_id = (
        tokenizer.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
    )
    eos_token_id = (
        tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    )
    return TextBundle(
        tokenizer_json=tokenizer_json.encode(),
        chat_template=_chat_template(path, settings),
        special_tokens=special_tokens,
        bos_token_id=bos_token_id,
        eos_token_ids=_eos_token_ids(path, config, tokenizer, special_tokens),
        adds_bos=_adds_bos(settings, tokenizer, bos_token_id),
        closing_token_id=eos_token_id if settings.get("add_eos_token") is True else None,
    )


def _tokenizer_json(path: Path) -> str:
    file = path / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not (path / "tokenizer.model").is_file():
        raise ConfigError(f"directory {path} has no tokenizer.json", "source")
    from transformers import AutoTokenizer  # takes seconds to import; only such old models need it

    text: str = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer.to_str()
    return text


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: Any) -> str | None:
    """A special token is written as a string, or as an object with its flags."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(
    path: Path, config: Mapping[str, Any], tokenizer: Tokenizer, special_tokens: Mapping[str, str]
) -> list[int]:
    given = _optional_json(path / "generation_config.json").get("eos_token_id")
    if given is None:
        given = config.get("eos_token_id")
    if given is None and "eos_token" in special_tokens:
        given = tokenizer.token_to_id(special_tokens["eos_token"])
    if given is None:
        return []
    return sorted(set(given)) if isinstance(given, list) else [int(given)]


def _adds_bos(settings: Mapping[str, Any], tokenizer: Tokenizer, bos_token_id: int | None) -> bool:
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    # Not said: the tokenizer's post-processor shows it on any text.
    return bos_token_id is not None and tokenizer.encode("a").ids[:1] == [bos_token_id]
