"""Requests for vectors, and their texts in the order of their turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_service.engine import Timeline
from engine_service.fair_share import FairShare
from engine_service.refusal import Refusal
from engine_service.scheduling_policy import FirstComeFirstServed
from shared.identifiers import RequestId, TenantId
from shared.messages import Embed


@dataclass(slots=True, eq=False)
class EmbeddingRequest:
    """One Embed, and the vectors that are there so far."""

    embed: Embed
    waits_since_s: float  # monotonic: its arrival, then the last time that one of its texts was taken
    deadline_s: float | None
    timeline: Timeline
    texts: list[Text] = field(init=False)
    vectors: list[bytes] = field(init=False)  # of each text; empty: not computed yet
    num_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [Text(self, index, tokens) for index, tokens in enumerate(self.embed.token_id_lists)]
        self.vectors = [b""] * len(self.texts)
        self.num_missing = len(self.texts)

    @property
    def num_tokens(self) -> int:
        return self.timeline.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Text:
    """What goes through the model as a whole, and waits its turn by itself (`scheduling_policy.Queued`).

    Were whole requests to take turns, one of thousands of texts would hold up everybody behind it.
    """

    request: EmbeddingRequest
    index: int
    token_ids: list[int]
    is_waiting: bool = False

    num_preemptions = 0

    @property
    def request_id(self) -> RequestId:
        """Of this text alone: policies tell by it what waits."""
        return RequestId(f"{self.request.embed.request_id}/{self.index}")

    @property
    def tenant(self) -> TenantId:
        return self.request.embed.tenant

    @property
    def priority(self) -> int:
        return self.request.embed.priority

    @property
    def arrival_s(self) -> float:
        """Ageing is for those who get nothing: a large request is not to grow old while it is served."""
        return self.request.waits_since_s

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


EmbeddingPolicy = FairShare[Text] | FirstComeFirstServed[Text]


class EmbeddingQueue:
    """Accepted requests until their last text is computed. Bounded by requests and by tokens that wait."""

    def __init__(self, policy: EmbeddingPolicy, *, max_requests: int, max_tokens: int | None) -> None:
        """`max_tokens` None: no bound."""
        self._policy = policy
        self._max_requests = max_requests
        self._max_tokens = max_tokens or math.inf
        self._requests: dict[RequestId, EmbeddingRequest] = {}
        self._num_waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EmbeddingRequest]:
        return iter(self._requests.values())

    def __contains__(self, request: EmbeddingRequest) -> bool:
        return self._requests.get(request.embed.request_id) is request

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    def add(self, request: EmbeddingRequest) -> None:
        """Raises Refusal if there is no room."""
        request_id = request.embed.request_id
        if request_id in self._requests:
            raise Refusal("invalid_request", f"request id {request_id!r} is in use", "request_id")
        if len(self) >= self._max_requests:
            raise Refusal("queue_full", f"{len(self)} requests are waiting already")
        # A large request is refused for what waits before it, never for its own size.
        if self._requests and self._num_waiting_tokens + request.num_tokens > self._max_tokens:
            raise Refusal("queue_full", f"{self._num_waiting_tokens} tokens are waiting already")
        self._requests[request_id] = request
        for text in request.texts:
            text.is_waiting = True
            self._policy.add(text)
        self._num_waiting_tokens += request.num_tokens

    def take(self, *, max_texts: int, max_tokens: int, now_s: float) -> list[Text]:
        """The texts of the next pass; a text that is longer than `max_tokens` comes alone."""
        taken: list[Text] = []
        num_tokens = 0
        while len(taken) < max_texts and (text := self._policy.head()) is not None:
            num_tokens += text.num_prompt_tokens
            if taken and num_tokens > max_tokens:
                break
            self._leave_queue(text)
            self._policy.admitted(text)
            text.request.waits_since_s = now_s
            taken.append(text)
        return taken

    def put(self, text: Text, vector: bytes) -> bool:
        """The vector of a text that was taken; whether it was the last one that its request lacked."""
        request = text.request
        assert not request.vectors[text.index], f"{text.request_id} was computed twice"
        request.vectors[text.index] = vector
        request.num_missing -= 1
        self._policy.ended(text)
        if request.num_missing == 0:
            del self._requests[request.embed.request_id]
        return request.num_missing == 0

    def abort(self, request_id: RequestId) -> EmbeddingRequest | None:
        """The request is not wanted any more; None if it has ended or was never known."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for text in request.texts:
                if text.is_waiting:
                    self._leave_queue(text)
                if not request.vectors[text.index]:
                    self._policy.ended(text)
        return request

    def check(self) -> None:
        """Asserts the invariants."""
        waiting = [text for request in self for text in request.texts if text.is_waiting]
        assert {id(text) for text in self._policy} == {id(text) for text in waiting}, "lost in the queue"
        assert self._num_waiting_tokens == sum(map(len, (text.token_ids for text in waiting))), "tokens"
        for request in self:
            assert request.num_missing == sum(not vector for vector in request.vectors) > 0, "nothing to do"

    def _leave_queue(self, text: Text) -> None:
        self._policy.remove(text)
        text.is_waiting = False
        self._num_waiting_tokens -= text.num_prompt_tokens
