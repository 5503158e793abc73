"""The text of models without weights: one token per byte, and a plain chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.text_bundle import TextBundle

_NUM_BYTES = 256
_SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")  # ids from 256 on
VOCAB_SIZE = _NUM_BYTES + len(_SPECIAL_TOKENS)
END_ID = 256
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ end_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_text_bundle() -> TextBundle:
    """One token per byte, whose id is the byte, and one for each role and the end of a message."""
    vocabulary = {character: byte for byte, character in enumerate(_printable_bytes())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return TextBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=_CHAT_TEMPLATE,
        special_tokens={"end_token": _SPECIAL_TOKENS[0], "eos_token": _SPECIAL_TOKENS[0]},
        bos_token_id=None,
        eos_token_ids=[END_ID],
    )


def _printable_bytes() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py).

    Printable Latin-1 stands for itself; the rest follows from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(_NUM_BYTES)]
