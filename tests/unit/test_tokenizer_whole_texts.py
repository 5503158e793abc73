"""Texts that are embedded: the special tokens at their ends, and nothing cut or filled up."""

from __future__ import annotations

import msgspec
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from shared.byte_text import byte_text_bundle
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer

START, END = 257, 256
HI = [104, 105]


def bundle(*, with_ends: bool = False, **changes: object) -> TextBundle:
    """The fake model's: one token per byte."""
    fast = FastTokenizer.from_str(byte_text_bundle().tokenizer_json.decode())
    if with_ends:
        fast.post_processor = processors.TemplateProcessing(
            single="<|system|> $A <|end|>", special_tokens=[("<|system|>", START), ("<|end|>", END)]
        )
    # As files of sentence-transformers have it.
    fast.enable_truncation(4)
    fast.enable_padding(length=9)
    changes["tokenizer_json"] = fast.to_str().encode()
    return msgspec.structs.replace(byte_text_bundle(), **changes)


def test_the_tokenizers_own_special_tokens_stand_at_the_ends_of_a_text_but_not_of_a_prompt() -> None:
    tokenizer = Tokenizer(bundle(with_ends=True))
    assert tokenizer.encode_whole(["hi", ""]) == [[START, *HI, END], [START, END]]
    assert tokenizer.encode("hi") == HI


def test_a_text_is_neither_cut_nor_filled_up_whatever_the_file_says() -> None:
    tokenizer = Tokenizer(bundle())
    assert tokenizer.encode_whole(["hi" * 10, "hi"]) == [HI * 10, HI]
    assert tokenizer.encode("hi" * 10) == HI * 10


@pytest.mark.parametrize("with_ends", [False, True])
def test_ends_that_are_named_beside_the_tokenizer_come_once(with_ends: bool) -> None:
    tokenizer = Tokenizer(
        bundle(with_ends=with_ends, bos_token_id=START, adds_bos=True, closing_token_id=END)
    )
    assert tokenizer.encode_whole(["hi"]) == [[START, *HI, END]]
    assert tokenizer.encode("hi") == [START, *HI]
