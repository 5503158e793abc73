"""Text bundles of small chat models: a token for each byte, and markers as a test wants them."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from gateway.openai.turn import Speaker
from shared.config import ModelConfig
from shared.messages import ModelCard
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer

PLAIN_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
END = "<end>"


def text_bundle(
    template: str = PLAIN_TEMPLATE, *, special: Sequence[str] = (), added: Sequence[str] = ()
) -> TextBundle:
    """`special`: tokens that are no text; `added`: tokens for pieces of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return TextBundle(tokenizer.to_str().encode(), template, {}, None, [tokenizer.token_to_id(END)])


def speaker(bundle: TextBundle, config: ModelConfig | None = None) -> Speaker:
    tokenizer = Tokenizer(bundle)
    card = ModelCard(
        name="chat",
        architecture="none",
        vocab_size=tokenizer.vocab_size,
        max_model_len=100_000,
        max_num_seqs=8,
        block_size=16,
        num_blocks=10_000,
        dtype="float32",
        eos_token_ids=bundle.eos_token_ids,
    )
    return Speaker(tokenizer, card, config)


def grammar_tokenizer(bundle: TextBundle) -> LLTokenizer:
    """As an engine makes it."""
    return LLTokenizer(bundle.tokenizer_json.decode(), eos_token=bundle.eos_token_ids)
