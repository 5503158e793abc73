"""Text to tokens and back for one model, without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from shared.chat_template import ChatTemplate
from shared.errors import InvalidRequest
from shared.segment_cache import SegmentCache
from shared.text_bundle import TextBundle
from shared.word_cache import WordCache

_NUM_CACHED_TEXTS = 65_536


class Tokenizer:
    """What a text bundle can do. Thread-safe; building one costs about 0.1 s for 50k tokens."""

    def __init__(self, bundle: TextBundle) -> None:
        self._fast = FastTokenizer.from_str(bundle.tokenizer_json.decode())
        # What a file asks for was meant for batches of its training: texts are neither cut nor filled up.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._template = (
            ChatTemplate(bundle.chat_template, bundle.special_tokens) if bundle.chat_template else None
        )
        self._bos = [bundle.bos_token_id] if bundle.adds_bos and bundle.bos_token_id is not None else []
        self._closing = [bundle.closing_token_id] if bundle.closing_token_id is not None else []
        self._words = WordCache(self._fast)
        self._segments = SegmentCache(self._fast, self._words.encode)
        self._longest_token = max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)
        self._text_of_token = lru_cache(_NUM_CACHED_TEXTS)(self._decode_token)
        self._added_tokens = self._fast.get_added_tokens_decoder()
        self._special_tokens = {number for number, token in self._added_tokens.items() if token.special}
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises InvalidRequest if the model has none."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "model")
        return self._template

    def min_num_tokens(self, num_characters: int) -> int:
        """Fewer tokens than this cannot hold so much text: known without tokenising it."""
        return num_characters // self._longest_token

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the bos token where the model wants one."""
        return self._bos + self.encode_each([text])[0]

    @property
    def num_added_tokens(self) -> int:
        """Those that `encode` puts before the ones of the text."""
        return len(self._bos)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> list[int]:
        """Tokens of a conversation, by default up to where the assistant answers; other arguments as of
        `ChatTemplate.render`. What was tokenised before is remembered for the same `owner`.

        Raises InvalidRequest.
        """
        # The template writes the special tokens itself, bos included.
        return self._segments.encode(
            self.chat_template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            ),
            owner,
        )

    def bad_word_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and behind a space, where the two differ.

        vLLM passes over the second form if it has another length than the first. Then the word could still
        come behind a space, so here both are barred.
        """
        texts = []
        for word in words:
            bare = word.lstrip() or word  # a word of blanks is meant as it is
            texts += [bare, " " + bare]
        if not texts:
            return ()
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in self.encode_each(texts) if token_ids))

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept_special_tokens: frozenset[int] = frozenset(),
    ) -> str:
        """`kept_special_tokens` are text also where the others are skipped."""
        if skip_special_tokens and kept_special_tokens:
            skipped = self._special_tokens - kept_special_tokens
            token_ids = [token_id for token_id in token_ids if token_id not in skipped]
            skip_special_tokens = False
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def added_token(self, text: str) -> int | None:
        """The token that the vocabulary has for just this text, apart from the pieces of other texts."""
        token_id = self._fast.token_to_id(text)
        return token_id if token_id in self._added_tokens else None

    def is_special(self, token_id: int) -> bool:
        """Whether it is skipped where special tokens are."""
        return token_id in self._special_tokens

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of pieces of text, without a bos token."""
        return self._words.encode(texts)

    def encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of whole texts, for embedding: with what the tokenizer's own file puts around a text."""
        encodings = self._fast.encode_batch_fast(texts, add_special_tokens=True)
        return [self._between_ends(encoding.ids) for encoding in encodings]

    def text_of_token(self, token_id: int) -> str:
        """One token by itself: special ones by their name, a space that it begins with kept."""
        return self._text_of_token(token_id)

    def spelling_of_token(self, token_id: int) -> str:
        """As the vocabulary has it, with that one's own signs for spaces and bytes; empty if it has none."""
        return self._fast.id_to_token(token_id) or ""

    def _between_ends(self, token_ids: list[int]) -> list[int]:
        """Some models name the tokens at the ends apart from the tokenizer, and some in both places."""
        opening = self._bos if token_ids[:1] != self._bos else []
        closing = self._closing if token_ids[-1:] != self._closing else []
        return [*opening, *token_ids, *closing]

    def _decode_token(self, token_id: int) -> str:
        # Some decoders strip a space, at the very start of the text only.
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]
