"""Tokens to text while they arrive: no split characters, no piece of a stop string ever shown."""

from __future__ import annotations

from collections.abc import Sequence

from shared.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
NUM_PRIMING_TOKENS = 5  # of the prompt: decoders that strip a leading space need something before it
MAX_HELD_TOKENS = 4  # a UTF-8 character has at most four bytes, so at most four byte tokens


class IncrementalDetokenizer:
    """Text of one sequence.

    Two offsets into the tokens, both only ever move forward: the text of `[context, read)` is what
    the last decoded piece is compared against, everything before `read` has been turned into text.
    A window of a few tokens is decoded each time, so a long output costs linear time, also when
    the model writes bytes that never become a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        include_stop_in_output: bool = False,
        skip_special_tokens: bool = True,
        kept_special_tokens: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """Stop strings are looked for in what comes after the first `min_tokens` tokens."""
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept_special_tokens = kept_special_tokens
        self._token_ids = list(prompt_token_ids[-NUM_PRIMING_TOKENS:])
        self._context = 0
        self._read = self._num_primed = len(self._token_ids)
        self._stop = StopStrings(stop, include_stop_in_output) if stop else None

    @property
    def stopped(self) -> bool:
        """A stop string was met; further tokens add no text."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The one that was met."""
        return self._stop.matched if self._stop is not None else None

    @property
    def num_tokens(self) -> int:
        """Tokens taken in, up to and including the one that completed a stop string."""
        return len(self._token_ids) - self._num_primed

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add and that may be shown now."""
        if (
            self._stop is None
            and len(token_ids) > 1
            and (text := self._append_at_once(token_ids)) is not None
        ):
            return text
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self._token_ids.append(token_id)
            if piece := self._decode_window():
                may_stop = self._stop is not None and self.num_tokens > self._min_tokens
                pieces.append(self._stop.push(piece) if self._stop and may_stop else piece)
        return "".join(pieces)

    def _append_at_once(self, token_ids: Sequence[int]) -> str | None:
        """As `append`, with two decodings in all rather than two for each token; None, and nothing is taken
        in, if a character may not be complete."""
        end = len(self._token_ids)
        self._token_ids += token_ids
        text = self._decode(self._context, len(self._token_ids))
        if text.endswith(REPLACEMENT):
            del self._token_ids[end:]
            return None
        piece = text[len(self._decode(self._context, self._read)) :]
        if piece:
            self._context, self._read = self._read, len(self._token_ids)
        return piece

    def finish(self) -> str:
        """The text that was held back; call once, when the sequence has ended for any reason."""
        if self.stopped:
            return ""
        rest = ""
        if self._read < len(self._token_ids):
            text = self._decode(self._context, len(self._token_ids))
            rest = text[len(self._decode(self._context, self._read)) :]
            self._context = self._read = len(self._token_ids)
        if self._stop is None:
            return rest
        return self._stop.push(rest) + self._stop.flush()

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._token_ids[start:end],
            skip_special_tokens=self._skip_special_tokens,
            kept_special_tokens=self._kept_special_tokens,
        )

    def _decode_window(self) -> str:
        end = len(self._token_ids)
        shown = self._decode(self._context, self._read)
        text = self._decode(self._context, end)
        if text.endswith(REPLACEMENT):
            if end - self._read <= MAX_HELD_TOKENS:
                return ""
            # Too long for one character: these bytes are invalid. Let go of all but a tail that
            # may still begin a character, cutting where the cut does not change the text.
            for tail in range(1, MAX_HELD_TOKENS):
                head = self._decode(self._context, end - tail)
                if head + self._decode(end - tail, end) == text:
                    end, text = end - tail, head
                    break
        piece = text[len(shown) :]
        if piece or end - self._read > MAX_HELD_TOKENS:
            self._context, self._read = self._read, end
        return piece


class StopStrings:
    """Cuts a text at the first stop string and holds back what might be the start of one."""

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._num_held_back = max(map(len, self._stop)) - 1
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of held-back and new text that can no longer belong to a stop string."""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            # The one completed first, so that the result does not depend on how tokens are grouped.
            end, begin, self.matched = min(found)
            shown, self._held = self._held[: end if self._include_in_output else begin], ""
            return shown
        cut = len(self._held) - self._num_held_back
        if cut <= 0:
            return ""
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held if self.matched is None else ""
