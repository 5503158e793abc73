"""The `fake:` model source: a whole stack without weights, for tests of everything but the model.

    fake:                                 instant steps, never an end of sequence
    fake:step_delay_ms=20,eos_every=50    options, separated by commas

It says printable ASCII, which follows from nothing but the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_service.fake_runner import FakeModel, FakeRunner
from engine_service.served_model import ServedModel
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.messages import ModelCard
from shared.text_bundle import TextBundle

_NUM_BYTES = 256
_SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")  # ids from 256 on
VOCAB_SIZE = _NUM_BYTES + len(_SPECIAL_TOKENS)
_END_ID = 256
DEFAULT_MAX_MODEL_LEN = 4096
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ end_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_OPTIONS = {"step_delay_ms": 0.0, "eos_every": 0.0, "die_at_step": 0.0}


def load_fake_model(config: ModelConfig) -> ServedModel:
    """Raises ConfigError on an option that is unknown or not a number."""
    options = parse_options(config.source, _OPTIONS)
    max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
    num_blocks = config.num_gpu_blocks_override or config.max_num_seqs * -(
        -max_model_len // config.block_size
    )
    runner = FakeRunner(
        num_blocks,
        config.block_size,
        model=FakeModel(eos_token_id=_END_ID, eos_every=int(options["eos_every"])),
        verify=False,
        step_delay_s=options["step_delay_ms"] / 1000,
        die_at_step=int(options["die_at_step"]),
    )
    card = ModelCard(
        name=config.name,
        architecture="FakeModel",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=config.dtype,
        eos_token_ids=[_END_ID],
    )
    return ServedModel(runner, card, fake_text_bundle())


def fake_text_bundle() -> TextBundle:
    """One token per byte, whose id is the byte, and a plain chat template."""
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
        eos_token_ids=[_END_ID],
    )


def _printable_bytes() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py).

    Printable Latin-1 stands for itself; the rest follows from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(_NUM_BYTES)]


def parse_options(source: str, defaults: Mapping[str, float]) -> dict[str, float]:
    """Raises ConfigError on an option that is none of the defaults, or not a number."""
    options = dict(defaults)
    for assignment in filter(None, source.removeprefix("fake:").split(",")):
        name, _, value = assignment.partition("=")
        if name not in options:
            raise ConfigError(
                f"unknown option {name!r} of a fake model; known: {', '.join(defaults)}", "source"
            )
        try:
            options[name] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"option {name} of a fake model is not a number: {value!r}", "source"
            ) from error
    return options
