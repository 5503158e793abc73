"""An engine of the real wire whose steps take the time that a `BatchingModel` says.

Steps are scheduled at absolute times: each begins when the one before it should have ended. What this
process is late by (a busy machine, a long collection) delays one message and not those behind it, and is
counted.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.simulator.answer import Answer
from loadtest.simulator.batching_model import BatchingModel, Step
from loadtest.simulator.knobs import SimulatorKnobs
from loadtest.simulator.stalls import Stalls
from loadtest.simulator.wire_engine import (
    DEFAULT_MAX_MODEL_LEN,
    HEARTBEAT_INTERVAL_S,
    WireEngine,
    byte_model_card,
)
from shared.config import ModelConfig
from shared.identifiers import EngineId, RequestId
from shared.messages import EngineLoad, RejectCode, SequenceUpdate, Submit
from shared.redis_schema import RedisKeys

_MAX_MESSAGES_PER_TURN = 200  # before steps get their turn
_POLL_MARGIN_S = 0.001  # poll counts in whole milliseconds; what is left is slept
_VOCAB_SIZE = 1 << 16  # prompts of token ids may have those of any usual vocabulary
# What a client can ask of a model and nothing here can answer: fields of SamplingParams.
_NEEDS_A_MODEL = ("structured_output", "logprobs", "prompt_logprobs", "beam_search")


@dataclass(slots=True)
class Lateness:
    """By how much messages left after they should have."""

    num_steps: int = 0
    num_late_steps: int = 0  # by more than half of the step's own duration
    largest_s: float = 0.0

    def note(self, late_s: float, duration_s: float) -> None:
        self.num_steps += 1
        self.num_late_steps += late_s > duration_s / 2
        self.largest_s = max(self.largest_s, late_s)


class SimulatedEngine(WireEngine):
    """Of one thread, which calls `turn` again and again. Raises ConfigError for a model that it cannot be."""

    def __init__(
        self,
        address: str,
        redis_url: str,
        keys: RedisKeys,
        config: ModelConfig,
        knobs: SimulatorKnobs,
        *,
        engine_id: EngineId | None = None,
        advertise: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of the configuration count the name, max_model_len, max_num_seqs, block_size and
        num_gpu_blocks_override."""
        self._knobs = knobs
        self._clock = clock
        self._num_blocks = _num_blocks(config)
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
        max_kv_tokens: int | None = None
        if config.num_gpu_blocks_override is not None:
            max_kv_tokens = self._num_blocks * config.block_size
            self._max_model_len = min(self._max_model_len, max_kv_tokens)
        self._max_queued_requests = config.max_queued_requests
        self._batching = BatchingModel[RequestId](knobs.batching(config.max_num_seqs, max_kv_tokens))
        self._stalls = Stalls(knobs)
        self._random = random.Random(knobs.seed)
        self._refusals = _EvenShare(knobs.reject_share)
        left = 1 - knobs.reject_share
        self._aborts = _EvenShare(knobs.abort_share / left if left else 0.0)
        self._answers: dict[RequestId, Answer] = {}  # all that were accepted and have not ended
        self._delayed: deque[tuple[float, Answer]] = deque()  # not queued before that time
        self._step: Step[RequestId] | None = None  # the one under way
        self._step_duration_s = 0.0
        self._step_end_s = 0.0
        self._still_until_s = 0.0  # a stall that began while there was nothing to do
        self._is_draining = False
        self._num_outstanding_tokens = 0
        self._next_deadline_check_s = 0.0
        self.lateness = Lateness()
        card = byte_model_card(
            config.name,
            self._max_model_len,
            vocab_size=_VOCAB_SIZE,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            num_blocks=self._num_blocks,
        )
        super().__init__(
            address, redis_url, keys, config.name, card=card, engine_id=engine_id, advertise=advertise
        )

    @property
    def is_idle(self) -> bool:
        return not self._answers

    def drain(self) -> None:
        """Refuses new requests from here on; `is_idle` tells when the others have ended."""
        self._is_draining = True
        self.say_goodbye()

    def turn(self, max_wait_s: float = HEARTBEAT_INTERVAL_S) -> None:
        """Waits for the next event, for so long at most, and does what is due."""
        wait_s = min(self.next_event_s - self._clock(), max_wait_s)
        has_message = self.poll(max(0, int((wait_s - _POLL_MARGIN_S) * 1000)))
        if not has_message and 0 < (left_s := self.next_event_s - self._clock()) <= 2 * _POLL_MARGIN_S:
            time.sleep(left_s)
        for _ in range(_MAX_MESSAGES_PER_TURN):
            if not self.poll(0):
                break
            self.receive()
        self._advance()
        self._end_late_answers()
        self.beat()

    # ---- what gateways send

    def on_submit(self, gateway: bytes, submit: Submit) -> None:
        now_s = self._clock()
        self._stalls.note_request(now_s)
        if refused := self._reason_to_refuse(submit):
            code, message, param = refused
            self.reject(gateway, submit.request_id, code, message, param)
            return
        num_room = self._max_model_len - len(submit.prompt_token_ids) - len(submit.output_token_ids)
        answer = Answer(
            gateway,
            submit,
            min(submit.sampling.max_tokens - len(submit.output_token_ids), num_room),
            now_s=now_s,
            tokens_per_message=self._knobs.tokens_per_message,
            is_aborted=self._aborts.takes_next(),
        )
        self._answers[submit.request_id] = answer
        self._num_outstanding_tokens += answer.num_tokens_to_come
        self._delayed.append((now_s + self._knobs.ttft_floor_ms / 1e3, answer))

    def on_abort(self, gateway: bytes, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if (answer := self._answers.get(request_id)) is not None and answer.gateway == gateway:
                self._end(answer)

    def on_lost(self, gateway: bytes) -> None:
        for answer in list(self._answers.values()):
            if answer.gateway == gateway:
                self._end(answer)

    # ---- steps

    def _advance(self) -> None:
        """Does all that should have happened by now, in the order in which it should have."""
        while (at_s := self.next_event_s) <= self._clock():
            if at_s == self._stalls.next_s:
                self._stand_still(at_s)
            elif self._step is not None:
                self._finish_step()
                self._begin_step(at_s)
            else:
                self._begin_step(at_s)

    @property
    def next_event_s(self) -> float:
        if self._step is not None:
            work_s = self._step_end_s
        elif self._delayed:
            work_s = max(self._delayed[0][0], self._still_until_s)
        else:
            work_s = math.inf
        return min(work_s, self._stalls.next_s)

    def _stand_still(self, at_s: float) -> None:
        self._stalls.begin()
        if self._step is not None:
            self._step_end_s += self._stalls.duration_s
        else:
            self._still_until_s = max(self._still_until_s, at_s) + self._stalls.duration_s

    def _begin_step(self, at_s: float) -> None:
        """With all that is queued by then."""
        while self._delayed and self._delayed[0][0] <= at_s:
            _, answer = self._delayed.popleft()
            if self._answers.get(answer.request_id) is answer:
                self._batching.submit(answer.request_id, answer.num_prompt_tokens, answer.num_output_tokens)
        self._step = self._batching.next_step()
        if self._step is not None:
            jitter = self._knobs.itl_jitter
            self._step_duration_s = self._step.duration_s * (1 + jitter * self._random.uniform(-1, 1))
            self._step_end_s = at_s + self._step_duration_s

    def _finish_step(self) -> None:
        step = self._step
        assert step is not None, "only a step that was begun ends"
        self._step = None
        for request_id, num_cached in zip(step.first, step.num_cached, strict=True):
            if (answer := self._answers.get(request_id)) is not None:
                answer.num_cached_tokens = num_cached
        updates: dict[bytes, list[SequenceUpdate]] = defaultdict(list)
        for request_id in (*step.first, *step.more):
            if (answer := self._answers.get(request_id)) is None:  # aborted meanwhile
                continue
            num_before = answer.num_tokens_to_come
            update = answer.take_token()
            self._num_outstanding_tokens += answer.num_tokens_to_come - num_before
            if update is not None:
                updates[answer.gateway].append(update)
            if answer.has_ended:
                self._end(answer)
        self.lateness.note(self._clock() - self._step_end_s, self._step_duration_s)
        for gateway, of_gateway in updates.items():
            self.say(gateway, of_gateway)

    def _end(self, answer: Answer) -> None:
        """Idempotent, and of no consequence to the model for who has ended there."""
        if self._answers.pop(answer.request_id, None) is not None:
            self._num_outstanding_tokens -= answer.num_tokens_to_come
            self._batching.abort(answer.request_id)

    def _end_late_answers(self) -> None:
        """Those whose time-out has passed."""
        if (now_s := self._clock()) < self._next_deadline_check_s:
            return
        self._next_deadline_check_s = now_s + HEARTBEAT_INTERVAL_S
        late = [
            one for one in self._answers.values() if one.deadline_s is not None and one.deadline_s < now_s
        ]
        for answer in late:
            self._end(answer)
            self.say(answer.gateway, [SequenceUpdate(answer.request_id, [], "abort")])

    # ---- what it tells

    def load(self) -> EngineLoad:
        model = self._batching
        num_blocks_held = min(-(-model.num_kv_tokens // self._block_size), self._num_blocks)
        undeclared_hits = int(model.num_prompt_tokens * self._knobs.undeclared_hit_points / 100)
        # The model has taken those out already that end with the step under way.
        num_running = model.num_running + (len(self._step.finished) if self._step is not None else 0)
        return EngineLoad(
            num_running=num_running,
            num_waiting=max(0, len(self._answers) - num_running),
            num_free_blocks=self._num_blocks - num_blocks_held,
            num_blocks=self._num_blocks,
            outstanding_tokens=self._num_outstanding_tokens,
            num_steps=model.num_steps,
            num_preemptions=model.num_preemptions,
            prompt_tokens=model.num_prompt_tokens,
            generation_tokens=model.num_generation_tokens,
            prefix_cache_queries=model.num_prompt_tokens,
            prefix_cache_hits=min(model.num_prefix_hits + undeclared_hits, model.num_prompt_tokens),
            max_num_seqs_now=model.parameters.max_num_seqs,
            max_num_tokens_now=model.parameters.max_step_tokens,
        )

    def _reason_to_refuse(self, submit: Submit) -> tuple[RejectCode, str, str | None] | None:
        if self._is_draining:
            return "draining", "this engine is being stopped", None
        if submit.request_id in self._answers:
            return "invalid_request", "a request of this id runs already", None
        for name in _NEEDS_A_MODEL:
            if getattr(submit.sampling, name) is not None:
                return "invalid_request", f"a simulated engine has no {name}", name
        num_prompt_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        if not submit.prompt_token_ids or len(submit.output_token_ids) >= submit.sampling.max_tokens:
            return "invalid_request", "there is nothing to generate", None
        if num_prompt_tokens >= self._max_model_len:
            message = f"the prompt has {num_prompt_tokens} tokens, max_model_len is {self._max_model_len}"
            return "context_length_exceeded", message, None
        if len(self._answers) - self._batching.num_running >= self._max_queued_requests:
            return "queue_full", "the engine's queue is full", None
        if self._refusals.takes_next():
            return "queue_full", "this simulated engine refuses a share of its requests", None
        return None


class _EvenShare:
    """Takes a share of what comes, spread evenly: of every hundred as many as the share says."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._num = 0

    def takes_next(self) -> bool:
        before, self._num = self._num, self._num + 1
        return math.floor(self._num * self._share + 1e-9) > math.floor(before * self._share + 1e-9)


def _num_blocks(config: ModelConfig) -> int:
    """As many as all slots may need, if nothing else is said."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    return config.max_num_seqs * -(-(config.max_model_len or DEFAULT_MAX_MODEL_LEN) // config.block_size)
