"""What happened to one request: raw times, from which every latency is derived.

All times are integer nanoseconds of one monotonic clock. Nothing derived is stored, so that a rule
(which chunk is the first token? from when?) can be changed after the run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

# "client": the generator itself had no socket or port left; what failed then was not the server.
FailureKind = Literal[
    "connection", "timeout", "http_status", "error_event", "bad_stream", "cut", "empty", "client"
]


@dataclass(slots=True)
class RequestRecord:
    """Written by the one coroutine that makes the request; read-only once `t_end_ns` is set.

    A *chunk* is an event with a non-empty `choices`, vLLM's rule; the role delta that begins a chat
    answer and the event that carries only `finish_reason` are chunks too. Content is text, reasoning
    or a tool call that is not empty.
    """

    index: int
    num_output_tokens_asked: int
    t_due_ns: int
    num_prompt_tokens: int | None = None  # what we sent; replaced by what usage says
    num_output_tokens: int | None = None  # from usage only, never guessed
    num_cached_tokens: int | None = None  # of the prompt, where the server tells
    t_dispatch_ns: int | None = None  # the generator has come to it; later than due is the generator's fault
    t_ready_ns: int | None = None  # it has a free slot, where --max-concurrency makes it wait for one
    connect_ns: int | None = None  # how long a new connection took; None: one was reused
    t_sent_ns: int | None = None  # a connection is held, the bytes are handed to it
    t_headers_ns: int | None = None
    t_first_event_ns: int | None = None  # any event
    t_first_token_ns: int | None = None  # first content: text, reasoning or a tool call
    t_first_output_ns: int | None = None  # first content that is not reasoning
    chunk_times_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)  # in each; only if the server keeps a running count
    num_content_chunks: int = 0
    t_end_ns: int | None = None  # end of the stream, or of the attempt
    http_status: int | None = None
    finish_reason: str | None = None
    server_request_id: str | None = None
    trace_id: str | None = None  # as sent in `traceparent`
    is_trace_sampled: bool = False
    is_streamed: bool = True
    tenant: str = ""
    conversation: int | None = None
    turn: int = 0
    failure: FailureKind | None = None
    error: str = ""
    text: str = ""

    @property
    def succeeded(self) -> bool:
        return self.failure is None

    @property
    def ttft_ns(self) -> int | None:
        """First chunk - sent (vLLM's TTFT). None for an answer in one piece, which has no first token."""
        if not self.chunk_times_ns or self.t_sent_ns is None or not self.is_streamed:
            return None
        return self.chunk_times_ns[0] - self.t_sent_ns

    @property
    def ttft_content_ns(self) -> int | None:
        """First content - sent: what a reader of the answer waits for."""
        return self._since_sent(self.t_first_token_ns)

    @property
    def ttft_output_ns(self) -> int | None:
        """First content that is not reasoning - sent."""
        return self._since_sent(self.t_first_output_ns)

    @property
    def ttft_due_ns(self) -> int | None:
        """First content - due, so that time lost inside the generator counts too.

        An answer without any content showed nothing before its end. None for failures.
        """
        if not self.succeeded or self.t_end_ns is None:
            return None
        seen = self.t_first_token_ns if self.t_first_token_ns is not None else self.t_end_ns
        return seen - self.t_due_ns

    @property
    def e2el_ns(self) -> int | None:
        """Last chunk - sent (vLLM's E2EL: a trailing usage event and [DONE] are not waited for)."""
        if not self.chunk_times_ns or self.t_sent_ns is None:
            return None
        return self.chunk_times_ns[-1] - self.t_sent_ns

    @property
    def e2el_due_ns(self) -> int | None:
        """End of the stream - due. None for failures."""
        if not self.succeeded or self.t_end_ns is None:
            return None
        return self.t_end_ns - self.t_due_ns

    @property
    def tpot_ns(self) -> float | None:
        """(E2EL - TTFT) / (output tokens - 1); None below two tokens or chunks, or without usage.

        An answer that came in one piece says nothing about the time of a token: that is not 0.
        """
        e2el, ttft, num_tokens = self.e2el_ns, self.ttft_ns, self.num_output_tokens
        if e2el is None or ttft is None or num_tokens is None or num_tokens < 2:
            return None
        if len(self.chunk_times_ns) < 2:
            return None
        return (e2el - ttft) / (num_tokens - 1)

    @property
    def itls_ns(self) -> list[int]:
        """Gaps between chunks, which may hold several tokens each."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times_ns)]

    @property
    def dispatch_lag_ns(self) -> int | None:
        """Sent - due: the generator's own delay, or its wait for a free slot."""
        return None if self.t_sent_ns is None else self.t_sent_ns - self.t_due_ns

    @property
    def generator_lag_ns(self) -> int | None:
        """The part of that which is nobody's but the generator's: no wait for a slot, no connecting."""
        if self.t_sent_ns is None or self.t_dispatch_ns is None or self.t_ready_ns is None:
            return None
        late = self.t_dispatch_ns - self.t_due_ns
        return late + self.t_sent_ns - self.t_ready_ns - (self.connect_ns or 0)

    def _since_sent(self, time_ns: int | None) -> int | None:
        if time_ns is None or self.t_sent_ns is None or not self.is_streamed:
            return None
        return time_ns - self.t_sent_ns
