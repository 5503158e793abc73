"""What the cache of segments tells is what the tokenizer makes of the whole text."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shared.segment_cache import ENTRY_WEIGHT, SegmentCache

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im|>", "<s>"]
PIECES = [
    *SPECIAL, "<|im_start|", "|>", "<added>", "user\n", "assistant\n", " ", "  ", "\n", "\n\n", "The water",
    " of the mill", "'s", "12 345", "ﬁ", "é", "e\u0301", "水車", "🙂", "\u200d", "\t", "ANN", "</s>", ".",
    " .", "\r\n", "\u2581",
]  # fmt: skip
CORPUS = ["the water of the mill's 12 wheels, and 345 more. É e\u0301 水車 🙂"] * 20


def trained(pre_tokenizer: object, normalizer: object = None) -> Tokenizer:
    fast = Tokenizer(models.BPE(byte_fallback=False))
    fast.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        fast.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    fast.add_tokens([AddedToken("<added>", normalized=True)])
    fast.decoder = decoders.ByteLevel()
    return fast


TOKENIZERS = {
    "byte level": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte level with a space before": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits, then byte level": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    ),
    "normalised": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFKC()),
    "prepended": trained(
        pre_tokenizers.Split(" ", "isolated"), normalizers.Sequence([normalizers.Prepend("\u2581")])
    ),
    "metaspace, always": trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace, first": trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace in a sequence, first": trained(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Digits(True)]
        )
    ),
}


def whole(fast: Tokenizer, text: str) -> list[int]:
    ids: list[int] = fast.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_are_those_of_the_whole_text(kind: str) -> None:
    fast, rng = TOKENIZERS[kind], random.Random(kind)
    cache = SegmentCache(
        fast, Counting(fast).tokenise, max_weight=40 * ENTRY_WEIGHT
    )  # so that some are forgotten
    for _ in range(1500):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        assert cache.encode(text, rng.choice("ab")) == whole(fast, text), text


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_special_tokens_that_look_at_their_neighbours_are_left_to_the_tokenizer(option: str) -> None:
    fast = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    fast.add_special_tokens([AddedToken("<|wide|>", special=True, normalized=False, **{option: True})])
    cache = SegmentCache(fast, Counting(fast).tokenise)
    for text in ("a <|wide|> b", "a<|wide|>b", "<|im_start|> a  <|wide|>  b<|im_end|>"):
        assert cache.encode(text, "a") == cache.encode(text, "a") == whole(fast, text)


def test_what_was_seen_is_not_tokenised_again_for_its_owner_only() -> None:
    fast = Counting(TOKENIZERS["byte level"])
    cache = SegmentCache(fast.fast, fast.tokenise)
    turn = "<|im_start|>The water of the mill<|im_end|>\n"
    cache.encode(turn, "ann")
    assert fast.texts == ["The water of the mill", "\n"]
    cache.encode(turn + "<|im_start|>more<|im_end|>", "ann")
    assert fast.texts[2:] == ["more"]
    cache.encode(turn, "bob")
    assert fast.texts[3:] == ["The water of the mill", "\n"]


def test_what_is_held_is_bounded_and_what_was_used_last_stays() -> None:
    fast = Counting(TOKENIZERS["byte level"])
    cache = SegmentCache(fast.fast, fast.tokenise, max_weight=4 * (ENTRY_WEIGHT + 10))
    for number in range(50):
        cache.encode("kept", "a")
        cache.encode(f"text {number}", "a")
    assert fast.texts.count("kept") == 1
    cache.encode("text 0", "a")
    assert fast.texts.count("text 0") == 2
    long = "water " * 2000  # which alone is more than the cache may hold
    assert cache.encode(long, "a") == whole(TOKENIZERS["byte level"], long)


def test_several_threads_may_ask_at_once() -> None:
    fast = TOKENIZERS["byte level"]
    cache = SegmentCache(fast, Counting(fast).tokenise, max_weight=20 * ENTRY_WEIGHT)
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            text = "".join(rng.choices(PIECES, k=8))
            if cache.encode(text, "a") != whole(fast, text):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Counting:
    """A tokenizer that remembers what it was asked to tokenise."""

    def __init__(self, fast: Tokenizer) -> None:
        self.fast = fast
        self.texts: list[str] = []

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        self.texts += texts
        return [whole(self.fast, text) for text in texts]
