"""The `fake:` model source: its tokenizer, its options, and how little it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine_service.fake_model import load_fake_model
from engine_service.served_model import build_engine
from shared.byte_text import byte_text_bundle
from shared.config import ModelConfig
from shared.errors import ConfigError, InvalidRequest
from shared.tokenizer import Tokenizer
from tests.unit.worlds import make_submit


def test_every_byte_is_a_token_and_every_text_comes_back() -> None:
    tokenizer = Tokenizer(byte_text_bundle())
    text = "Zoë says: 你好 \U0001f600\n\t\x00 done"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversation_has_its_roles_as_special_tokens() -> None:
    tokenizer = Tokenizer(byte_text_bundle())
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert token_ids == [258, ord("h"), ord("i"), 256, 259]
    with pytest.raises(InvalidRequest, match="unknown role"):
        tokenizer.encode_chat([{"role": "wizard", "content": "hi"}])


def test_what_it_says_is_printable_and_ends_where_it_was_told_to() -> None:
    config = ModelConfig(name="m", source="fake:eos_every=20", max_model_len=600)
    served = load_fake_model(config)
    engine = build_engine(config, served)
    engine.add(make_submit("r", [65], max_tokens=500))
    output: list[int] = []
    while engine.has_work:
        for update in engine.step().updates:
            output += update.new_token_ids
    engine.check()
    assert output[-1] == 256
    assert all(32 <= token < 127 for token in output[:-1])


@pytest.mark.parametrize("source", ["fake:speed=9", "fake:step_delay_ms=fast", "fake:step_delay_ms"])
def test_a_wrong_option_is_named(source: str) -> None:
    with pytest.raises(ConfigError, match=r"speed|step_delay_ms"):
        load_fake_model(ModelConfig(name="m", source=source))


def test_an_engine_without_weights_loads_no_torch() -> None:
    program = (
        "import sys, engine_service.main as main\n"
        "from shared.config import ModelConfig\n"
        "main.load_served_model(ModelConfig(name='m', source='fake:'))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
