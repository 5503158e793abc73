"""The `fake:` model source: a whole stack without weights, for tests of everything but the model.

    fake:                                 instant steps, never an end of sequence
    fake:step_delay_ms=20,eos_every=50    options, separated by commas

It says printable ASCII, which follows from nothing but the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_service.fake_runner import FakeModel, FakeRunner
from engine_service.served_model import ServedModel
from shared.byte_text import END_ID, VOCAB_SIZE, byte_text_bundle
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.messages import ModelCard

DEFAULT_MAX_MODEL_LEN = 4096
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
        model=FakeModel(eos_token_id=END_ID, eos_every=int(options["eos_every"])),
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
        eos_token_ids=[END_ID],
    )
    return ServedModel(runner, card, byte_text_bundle())


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
