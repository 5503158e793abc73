"""All that is needed to turn text into a model's tokens and back, as the engine hands it to gateways."""

from __future__ import annotations

import hashlib

import msgspec


class TextBundle(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`tokenizer_json` is the file of that name that the `tokenizers` library reads and writes."""

    tokenizer_json: bytes
    chat_template: str | None  # Jinja, in the form of Hugging Face; None for models without chat
    special_tokens: dict[str, str]  # names that templates use, e.g. bos_token -> "<|im_start|>"
    bos_token_id: int | None
    eos_token_ids: list[int]
    adds_bos: bool = False  # whether a plain prompt starts with the bos token
    closing_token_id: int | None = None  # behind a text that is embedded; never behind a prompt

    @property
    def content_hash(self) -> str:
        """SHA-256 of the content: equal bundles of two engines are loaded once."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()
