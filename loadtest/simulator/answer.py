"""The answer to one request, as a simulated engine makes it: words of no meaning, token by token."""

from __future__ import annotations

from shared.identifiers import RequestId
from shared.messages import FinishReason, SequenceUpdate, Submit

# A token is a byte, and each of these shows: a client sees something of every token.
_TEXT = (
    b"The lamp over the bridge was lit before the rain came down, and whoever crossed it late could see how "
    b"far the river had risen since the morning. Nobody asked about the boats. They had been brought in by "
    b"noon, one behind the other, and lay with their ropes doubled along the wall of the old mill, where the "
    b"water turns back upon itself and carries leaves in a slow circle until they sink. "
)


class Answer:
    """What is still to come, and what has come but was not sent: `take` one token at a time."""

    __slots__ = (
        "_ends_at",
        "_held",
        "_num_generated",
        "_offset",
        "_per_message",
        "deadline_s",
        "gateway",
        "is_aborted",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "request_id",
    )

    def __init__(
        self,
        gateway: bytes,
        submit: Submit,
        num_output_tokens: int,
        *,
        now_s: float,
        tokens_per_message: int,
        is_aborted: bool,
    ) -> None:
        """Aborted ones end after half of their tokens, at least one, and give no reason."""
        self.gateway = gateway
        self.request_id: RequestId = submit.request_id
        self.num_prompt_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        self.num_output_tokens = num_output_tokens
        self.deadline_s = None if submit.timeout_s is None else now_s + submit.timeout_s
        self.is_aborted = is_aborted
        self.num_cached_tokens = 0  # told with the first token
        self._ends_at = max(1, num_output_tokens // 2) if is_aborted else num_output_tokens
        self._per_message = tokens_per_message
        self._num_generated = 0
        # The same request has the same answer, and one that is continued goes on where it was.
        self._offset = (submit.sampling.seed + len(submit.output_token_ids)) % len(_TEXT)
        self._held: list[int] = []

    @property
    def has_begun(self) -> bool:
        return self._num_generated > 0

    @property
    def has_ended(self) -> bool:
        return self._num_generated >= self._ends_at

    @property
    def num_tokens_to_come(self) -> int:
        """To be computed, its prompt included while it has no first token."""
        num_left = self.num_output_tokens - self._num_generated
        return num_left if self.has_begun else num_left + self.num_prompt_tokens

    def take_token(self) -> SequenceUpdate | None:
        """What is to be sent of it now: the first token, a message full of them, or its end."""
        self._held.append(_TEXT[(self._offset + self._num_generated) % len(_TEXT)])
        self._num_generated += 1
        is_first = self._num_generated == 1
        if not (is_first or self.has_ended or len(self._held) >= self._per_message):
            return None
        finish_reason: FinishReason | None = None
        if self.has_ended:
            finish_reason = "abort" if self.is_aborted else "length"
        held, self._held = self._held, []
        return SequenceUpdate(
            self.request_id,
            held,
            finish_reason,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
        )
