"""Tokens of the parts of a text that were tokenised before: a conversation comes back whole in each turn.

Special tokens cut a text into segments, and `tokenizers` does everything else within one of them. So a text's
tokens are those of its segments, and a segment has the same ones wherever it stands.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer as FastTokenizer

MAX_WEIGHT = 4_000_000  # of all that is held, in tokens of four bytes each
ENTRY_WEIGHT = 64  # of what a segment takes beside its tokens
NAME_BYTES = 20
_TOKEN_TYPE = "i"


class SegmentCache:
    """Thread-safe. Holds tokens and keyed hashes, and no text."""

    def __init__(
        self,
        fast: FastTokenizer,
        tokenise: Callable[[Sequence[str]], list[list[int]]],
        max_weight: int = MAX_WEIGHT,
    ) -> None:
        """`tokenise`: what makes tokens of texts that are not known."""
        self._tokenise = tokenise
        self._max_weight = max_weight
        self._special_ids: dict[str, int] = {}
        self._cut: re.Pattern[str] | None = None  # None: segments of this tokenizer depend on their places
        if _is_cut_by_special_tokens(fast):
            self._special_ids = {
                token.content: number
                for number, token in fast.get_added_tokens_decoder().items()
                if not token.normalized
            }
            # The longest one at a place is what the tokenizer finds there, too.
            longest_first = sorted(self._special_ids, key=len, reverse=True)
            self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._own_key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._weight = 0

    def encode(self, text: str, owner: str) -> list[int]:
        """The tokens of a text, without any that would be put around it. What one owner has sent is found for
        that owner alone: how long it takes would tell others that it was sent."""
        if self._cut is None:
            return self._tokenise([text])[0]
        pieces = self._cut.split(text)  # every second one is a special token
        segments = pieces[::2]
        owners_key = _hash(owner, self._own_key, hashlib.blake2b.MAX_KEY_SIZE)
        names = [_hash(segment, owners_key, NAME_BYTES) for segment in segments]
        tokens_of = self._found(names)
        missing = {
            name: segment
            for name, segment in zip(names, segments, strict=True)
            if segment and name not in tokens_of
        }
        if missing:
            tokenised = dict(zip(missing, self._tokenise(list(missing.values())), strict=True))
            self._keep(tokenised)
            tokens_of |= tokenised
        token_ids: list[int] = []
        for index, name in enumerate(names):
            token_ids += tokens_of.get(name, ())
            if (special := 2 * index + 1) < len(pieces):
                token_ids.append(self._special_ids[pieces[special]])
        return token_ids

    def _found(self, names: Sequence[bytes]) -> dict[bytes, Sequence[int]]:
        found: dict[bytes, Sequence[int]] = {}
        with self._lock:
            for name in names:
                if (token_ids := self._known.get(name)) is not None:
                    found[name] = token_ids
                    self._known.move_to_end(name)
        return found

    def _keep(self, tokenised: dict[bytes, list[int]]) -> None:
        with self._lock:
            for name, token_ids in tokenised.items():
                if name not in self._known:  # which another thread may have put there
                    self._known[name] = array(_TOKEN_TYPE, token_ids)
                    self._weight += len(token_ids) + ENTRY_WEIGHT
            while self._weight > self._max_weight:
                _, oldest = self._known.popitem(last=False)
                self._weight -= len(oldest) + ENTRY_WEIGHT


def _hash(text: str, key: bytes, num_bytes: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=num_bytes).digest()


def _is_cut_by_special_tokens(fast: FastTokenizer) -> bool:
    """Whether its special tokens are cut out before all else, as they are written, and what lies between two
    of them does not depend on where it stands."""
    tokens = [token for token in fast.get_added_tokens_decoder().values() if not token.normalized]
    if not tokens or any(token.lstrip or token.rstrip or token.single_word for token in tokens):
        return False
    pre_tokenizer = json.loads(fast.to_str())["pre_tokenizer"]
    return not any(part.get("prepend_scheme") == "first" for part in _parts(pre_tokenizer))


def _parts(pre_tokenizer: dict[str, object] | None) -> Iterator[dict[str, object]]:
    if pre_tokenizer is None:
        return
    yield pre_tokenizer
    parts = pre_tokenizer.get("pretokenizers", [])
    assert isinstance(parts, list), "a sequence has its parts in a list"
    for part in parts:
        yield from _parts(part)
