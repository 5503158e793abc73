"""Tokens of the words of a text that were seen before.

The tokenizers of most models cut a text into words with a regular expression, and make tokens within one
word only. Words come again and again, so most are found here, in a third of the time. What is seldom, and
what could be another thing to Python's expressions than to those of `tokenizers`, is left to these: text that
is not ASCII, and cuts that are not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

MAX_CHARACTERS = 16_384  # more would hold the interpreter lock for too long
MAX_WORD_CHARACTERS = 64
MAX_WORDS = 100_000

_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# The same between single digits, where a digit is the end of what is looked at.
_GPT2_DIGITS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"""
# What the files of models spell out: those of the families of Llama 3 and of Qwen 2 and 3.
_SPELT_OUT = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)


class WordCache:
    """Thread-safe, as far as dicts are."""

    def __init__(self, fast: FastTokenizer, max_words: int = MAX_WORDS) -> None:
        self._fast = fast
        self._max_words = max_words
        pattern = _pattern_of(fast)
        self._cut = None if pattern is None else re.compile(_in_ascii(pattern), re.ASCII)
        marks = (token.content for token in fast.get_added_tokens_decoder().values())
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")  # "(?!)" is found nowhere
        self._tokens_of: dict[str, Sequence[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without any that would be put around it."""
        by_words = {index: words for index, text in enumerate(texts) if (words := self._words(text))}
        others = iter(self._tokenised([text for index, text in enumerate(texts) if index not in by_words]))
        return [
            self._of_words(by_words[index]) if index in by_words else next(others)
            for index in range(len(texts))
        ]

    def _words(self, text: str) -> list[str]:
        """Empty if the text is none for us."""
        if self._cut is None or len(text) > MAX_CHARACTERS or not text.isascii() or self._marks.search(text):
            return []
        return self._cut.findall(text)

    def _of_words(self, words: Sequence[str]) -> list[int]:
        known = self._tokens_of
        missing = [word for word in dict.fromkeys(words) if word not in known]
        seen = dict(zip(missing, self._tokenised(missing), strict=True)) if missing else {}
        token_ids: list[int] = []
        for word in words:
            token_ids += known.get(word) or seen[word]
        if seen:
            if len(known) + len(seen) > self._max_words:
                known = self._tokens_of = {}
            known.update((word, ids) for word, ids in seen.items() if len(word) <= MAX_WORD_CHARACTERS)
        return token_ids

    def _tokenised(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # The batch call gives up the interpreter lock, the single one does not: a large prompt that is
        # tokenised in a thread would still stop everything else.
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]


def _pattern_of(fast: FastTokenizer) -> str | None:
    """The expression whose matches are its words, for text in ASCII. None: it is not known here."""
    tokenizer = json.loads(fast.to_str())
    if any(token.normalized for token in fast.get_added_tokens_decoder().values()):
        return None  # it would be found inside of a word
    if (tokenizer["normalizer"] or {}).get("type") not in (None, "NFC"):  # which changes nothing in ASCII
        return None
    match _steps(tokenizer["pre_tokenizer"]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return _GPT2_DIGITS
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if pattern in _SPELT_OUT:
            return str(pattern)
    return None


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in _steps(part)]
    return [pre_tokenizer]


def _in_ascii(pattern: str) -> str:
    """For Python's expressions, which know no classes of Unicode by their names."""

    def letters_and_digits(found: re.Match[str]) -> str:
        return found[0].replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9")

    within_classes = re.sub(r"\[[^\]]*\]", letters_and_digits, pattern)
    return within_classes.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")
