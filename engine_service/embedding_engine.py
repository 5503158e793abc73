"""An embedding model at work: texts in, vectors out, pass by pass. No sockets, no threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_service.embedding_queue import EmbeddingPolicy, EmbeddingQueue, EmbeddingRequest, Text
from engine_service.engine import Timeline
from engine_service.refusal import Refusal
from shared.config import ModelConfig
from shared.embedding_limits import dim_of
from shared.errors import InvalidRequest
from shared.identifiers import RequestId
from shared.messages import Embed, Embedded, EngineLoad, ModelCard


class EmbeddingModel(Protocol):
    """What computes. Implemented by `EmbeddingRunner` (weights) and `FakeEmbedder` (a hash of the text)."""

    def vectors(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """`[len(texts), dim]`, in order. A vector depends on its own text only, not on the others."""


@dataclass(slots=True)
class PassOutcome:
    """What one forward pass has ended: requests that are answered, and such as cannot be."""

    embedded: list[Embedded] = field(default_factory=list)
    refusals: list[tuple[RequestId, Refusal]] = field(default_factory=list)
    finished: list[Timeline] = field(default_factory=list)  # of all that ended, aborted ones among them


def _no_aborts() -> Iterable[RequestId]:
    return ()


class EmbeddingEngine:
    """A queue and a model. Not thread-safe: everything is called from the thread that computes.

    `schedule` and `compute` alternate: between them, the load shows what is being computed.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        card: ModelCard,
        config: ModelConfig,
        policy: EmbeddingPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._card = card
        self._normalises = config.normalize
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._queue = EmbeddingQueue(
            policy, max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )
        self._clock = clock
        self._batch: list[Text] = []
        self._num_passes = 0
        self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        return len(self._queue) > 0

    def add(self, embed: Embed, received_s: float | None = None) -> None:
        """Queues a request, whose timeout runs from `received_s`. Raises Refusal."""
        now_s = self._clock() if received_s is None else received_s
        self._check_embed(embed)
        timeline = Timeline(embed.request_id, embed.tenant, embed.trace_context, queued_s=now_s)
        timeline.num_prompt_tokens = sum(map(len, embed.token_id_lists))
        deadline_s = None if embed.timeout_s is None else now_s + embed.timeout_s
        self._queue.add(EmbeddingRequest(embed, now_s, deadline_s, timeline))

    def abort(self, request_id: RequestId) -> Timeline | None:
        """Ends a request; None if it has ended or was never known."""
        request = self._queue.abort(request_id)
        return self._finish(request) if request is not None else None

    def drop_expired(self) -> PassOutcome:
        """Ends the requests whose deadline has passed, before they cost another pass."""
        outcome = PassOutcome()
        now_s = self._clock()
        for request in [each for each in self._queue if each.deadline_s is not None]:
            if request.deadline_s is not None and request.deadline_s <= now_s:
                refusal = Refusal("timed_out", "the request was not computed in time")
                self._refuse(request, refusal, outcome)
        return outcome

    def schedule(self) -> bool:
        """Plans a pass; False when there is nothing to compute."""
        assert not self._batch, "a planned pass was not computed"
        now_s = self._clock()
        self._batch = self._queue.take(
            max_texts=self._card.max_num_seqs, max_tokens=self._max_num_batched_tokens, now_s=now_s
        )
        for text in self._batch:
            timeline = text.request.timeline
            timeline.scheduled_s = now_s if timeline.scheduled_s is None else timeline.scheduled_s
        return bool(self._batch)

    def compute(self, poll_aborts: Callable[[], Iterable[RequestId]] = _no_aborts) -> PassOutcome:
        """Makes the planned pass.

        `poll_aborts` is asked right after the model has returned: what it names is not answered, and only
        its timelines are in the outcome.
        """
        outcome = PassOutcome()
        batch = self._batch
        vectors = self._model.vectors([text.token_ids for text in batch])
        self._batch = []
        self._num_passes += 1
        self._num_tokens += sum(text.num_prompt_tokens for text in batch)
        for request_id in poll_aborts():
            if (timeline := self.abort(request_id)) is not None:
                outcome.finished.append(timeline)
        complete = []
        for text, vector in zip(batch, vectors, strict=True):
            if text.request not in self._queue:
                continue  # it was aborted, or refused for another of its texts
            if not np.isfinite(vector).all():
                refusal = Refusal("internal_error", f"the vector of input[{text.index}] is not finite")
                self._refuse(text.request, refusal, outcome)
                continue
            vector = shortened(vector, text.request.embed.dimensions, normalises=self._normalises)
            if self._queue.put(text, vector.astype("<f4", copy=False).tobytes()):
                complete.append(text.request)
        self._answer(complete, outcome)
        return outcome

    def load(self) -> EngineLoad:
        """A request counts as running while one of its texts is in the pass; there are no blocks."""
        computed = {id(text.request) for text in self._batch if text.request in self._queue}
        in_pass = sum(text.num_prompt_tokens for text in self._batch)
        return EngineLoad(
            num_running=len(computed),
            num_waiting=len(self._queue) - len(computed),
            num_free_blocks=0,
            num_blocks=0,
            outstanding_tokens=self._queue.num_waiting_tokens + in_pass,
            num_steps=self._num_passes,
            prompt_tokens=self._num_tokens,
        )

    def check(self) -> None:
        """Asserts the invariants of all parts."""
        self._queue.check()

    def _check_embed(self, embed: Embed) -> None:
        """What the model relies on; the gateway has told the client before, in its words."""
        if not embed.token_id_lists:
            raise Refusal("invalid_request", "there are no texts", "input")
        for index, token_ids in enumerate(embed.token_id_lists):
            check_text(token_ids, self._card, f"input[{index}]")
        if embed.timeout_s is not None and math.isnan(embed.timeout_s):
            raise Refusal("invalid_request", "timeout_s is not a number", "timeout_s")
        try:
            dim_of(embed.dimensions, self._card)
        except InvalidRequest as error:
            raise Refusal("invalid_request", error.message, error.param) from error

    def _answer(self, requests: list[EmbeddingRequest], outcome: PassOutcome) -> None:
        outcome.finished += [self._finish(request) for request in requests]
        load = self.load()
        for request in requests:
            dim = len(request.vectors[0]) // 4
            outcome.embedded.append(Embedded(request.embed.request_id, b"".join(request.vectors), dim, load))

    def _refuse(self, request: EmbeddingRequest, refusal: Refusal, outcome: PassOutcome) -> None:
        request_id = request.embed.request_id
        self._queue.abort(request_id)
        outcome.refusals.append((request_id, refusal))
        outcome.finished.append(self._finish(request))

    def _finish(self, request: EmbeddingRequest) -> Timeline:
        request.timeline.finished_s = self._clock()
        return request.timeline


def check_text(token_ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Raises Refusal, which names `param`, for a text that does not go through the model."""
    if not token_ids:
        raise Refusal("invalid_request", "the text has no tokens", param)
    if len(token_ids) > card.max_model_len:
        raise Refusal(
            "context_length_exceeded",
            f"the text has {len(token_ids)} tokens; the model takes at most {card.max_model_len}",
            param,
        )
    if not 0 <= min(token_ids) <= max(token_ids) < card.vocab_size:
        raise Refusal("invalid_request", f"a token id is not below {card.vocab_size}", param)


def shortened(
    vector: NDArray[np.float32], dimensions: int | None, *, normalises: bool
) -> NDArray[np.float32]:
    """The first numbers of a vector; of length 1 again if the whole one was (arXiv 2205.13147)."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    length = np.linalg.norm(vector)
    return vector / length if normalises and length > 0 else vector
