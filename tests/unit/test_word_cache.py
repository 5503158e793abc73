"""Tokens that are put together of words are those which the tokenizer makes of the whole text."""

from __future__ import annotations

import itertools
import random
import string
import threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from shared import word_cache
from shared.word_cache import WordCache

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3, QWEN2 = word_cache._SPELT_OUT
KINDS = {
    "gpt2": GPT2,
    "gpt2 and digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES]),
}
CORPUS = [
    "the water's 12 wheels, and 345 mills. They'll turn: I'd say `if x == 10:\n\n    return y\t# 2`"
] * 20


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return fast


def whole(fast: Tokenizer, text: str) -> list[int]:
    ids: list[int] = fast.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture(scope="module", params=KINDS)
def fast(request: pytest.FixtureRequest) -> Tokenizer:
    return trained(KINDS[request.param])


def test_all_short_texts_of_one_sign_of_each_kind_have_the_same_tokens(fast: Tokenizer) -> None:
    """In whatever order letters, digits, blanks, line ends, and marks come."""
    cache = WordCache(fast)
    texts = [
        "".join(signs) for length in range(1, 6) for signs in itertools.product("aS1 \n'.", repeat=length)
    ]
    encodings = fast.encode_batch(texts, add_special_tokens=False)
    assert cache.encode(texts) == [encoding.ids for encoding in encodings]
    assert cache._tokens_of, "they were put together of words"


def test_random_texts_of_all_ascii_have_the_same_tokens(fast: Tokenizer) -> None:
    cache, rng = WordCache(fast, max_words=200), random.Random(0)  # so that they are forgotten sometimes
    signs = [*map(chr, range(128)), *("the", "water", "'ll", "'S", "  ", "\r\n", "\n\n", "123")]
    for _ in range(3000):
        text = "".join(rng.choices(signs, k=rng.randint(0, 30)))
        assert cache.encode([text]) == [whole(fast, text)], repr(text)


@pytest.mark.parametrize(
    "text", ["naïve", "水車", "a\u00a0b", "x <|end|> y", "", "🙂", "\u2028", "\ud800"[:0]]
)
def test_what_is_no_ascii_or_holds_a_special_token_is_left_to_the_tokenizer(
    fast: Tokenizer, text: str
) -> None:
    cache = WordCache(fast)
    assert cache.encode([text, "the water", text]) == [
        whole(fast, each) for each in (text, "the water", text)
    ]
    assert set(cache._tokens_of) == {"the", " water"}


@pytest.mark.parametrize("length", [word_cache.MAX_CHARACTERS, word_cache.MAX_CHARACTERS + 1])
def test_long_texts_and_long_words_have_the_same_tokens_and_are_not_kept(
    fast: Tokenizer, length: int
) -> None:
    cache = WordCache(fast)
    for text in ("a" * length, "the water " * (length // 10) + "x" * (length % 10)):
        assert cache.encode([text]) == [whole(fast, text)]
    assert all(len(word) <= word_cache.MAX_WORD_CHARACTERS for word in cache._tokens_of)


def other_kinds() -> dict[str, Tokenizer]:
    with_prefix = trained(pre_tokenizers.ByteLevel(add_prefix_space=True))
    lowered = trained(GPT2)
    lowered.normalizer = normalizers.Lowercase()
    added = trained(GPT2)
    added.add_tokens([AddedToken("water", normalized=True)])
    return {
        "a space before": with_prefix,
        "lower case": lowered,
        "an added token that is text": added,
        "another cut": trained(pre_tokenizers.Split(Regex("[aeiou]"), "isolated")),
        "the cut turned round": trained(
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated", invert=True), BYTES])
        ),
        "metaspace": trained(pre_tokenizers.Metaspace()),
    }


@pytest.mark.parametrize("kind", other_kinds())
def test_what_cuts_in_other_ways_is_left_to_the_tokenizer(kind: str) -> None:
    fast = other_kinds()[kind]
    cache = WordCache(fast)
    for text in ("the water", "The waters' 12", "drinkwater", string.printable):
        assert cache.encode([text]) == cache.encode([text]) == [whole(fast, text)]
    assert not cache._tokens_of


def test_normalising_to_nfc_leaves_ascii_as_it_is() -> None:
    fast = trained(KINDS["qwen2"])
    fast.normalizer = normalizers.NFC()
    cache = WordCache(fast)
    for text in (string.printable, "e\u0301"):
        assert cache.encode([text]) == [whole(fast, text)]
    assert cache._tokens_of


def test_several_threads_may_ask_at_once() -> None:
    fast = trained(GPT2)
    cache = WordCache(fast, max_words=30)
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            text = "".join(rng.choices("ab '.\n12", k=12))
            if cache.encode([text]) != [whole(fast, text)]:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
