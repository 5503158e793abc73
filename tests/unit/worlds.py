"""Tiny worlds: an engine with a fake model, small enough that every block can be followed by eye."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine_service.block_pool import BlockPool
from engine_service.compute_thread import ComputeThread
from engine_service.engine import Engine
from engine_service.fake_runner import FakeModel, FakeRunner, FakeStep
from engine_service.kv_events import KvEvent, KvEventRecorder
from engine_service.refusal import Refusal
from engine_service.scheduler import Scheduler
from engine_service.scheduling_policy import SchedulingPolicy
from engine_service.sequence import Sequence, StepPlan
from engine_service.step_execution import OverlappedExecution
from engine_service.step_limits import StepLimits
from engine_service.structured_output.grammar_desk import GrammarDesk
from shared.identifiers import RequestId, TenantId
from shared.messages import SequenceUpdate, Submit, TokenLogprobs
from shared.sampling import SamplingParams

VOCAB_SIZE = 1000
EOS = 999
MODEL = FakeModel(token_ids=range(900), eos_token_id=EOS)


class ManualClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class ListeningRunner(FakeRunner):
    """Keeps the plans that it was given; in `steps` as (request id, start, number of tokens) per row."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[StepPlan] = []
        self.steps: list[list[tuple[str, int, int]]] = []

    def prepare(self, plan: StepPlan) -> FakeStep:
        self.plans.append(plan)
        self.steps.append([(row.sequence.request_id, row.start, row.num_tokens) for row in plan.rows])
        return super().prepare(plan)


class _Overlap:
    """One compute thread for all worlds with overlap, of which only the newest may be used."""

    def __init__(self) -> None:
        self._thread = ComputeThread()
        self._newest: OverlappedExecution | None = None

    def execution(self) -> OverlappedExecution:
        if self._newest is not None:
            # Else a step that a failed test has left there would wait for ever, and all tests behind it.
            self._newest.close()
        self._newest = OverlappedExecution(self._thread)
        return self._newest


@functools.cache
def _overlap() -> _Overlap:
    return _Overlap()


@dataclass
class World:
    """An engine and all that it has said."""

    engine: Engine
    scheduler: Scheduler
    pool: BlockPool
    runner: ListeningRunner
    clock: ManualClock
    output: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    last_update: dict[str, SequenceUpdate] = field(default_factory=dict)
    finish_order: list[str] = field(default_factory=list)
    kv_events: list[KvEvent] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)  # that came after a request was accepted

    def add(self, name: str, prompt: list[int], **options: Any) -> Submit:
        submit = make_submit(name, prompt, **options)
        self.submit(submit)
        return submit

    def submit(self, submit: Submit) -> None:
        self.engine.add(submit)
        self.output[submit.request_id] = []
        self.logprobs[submit.request_id] = []
        self.prompt_logprobs[submit.request_id] = []

    def abort(self, name: str) -> bool:
        return self.engine.abort(RequestId(name)) is not None

    def step(self, aborts: Iterable[str] = ()) -> list[SequenceUpdate]:
        """One step, invariants checked before and after; `aborts` arrive while the model computes, and are
        not asked for before."""
        self.engine.check()
        outcome = self.engine.step(lambda: [RequestId(name) for name in aborts])
        self.engine.check()
        self.refusals.update(outcome.refusals)
        for update in outcome.updates:
            self.output[update.request_id] += update.new_token_ids
            self.logprobs[update.request_id] += update.logprobs
            self.prompt_logprobs[update.request_id] += update.prompt_logprobs
            if update.finish_reason is not None:
                self.finish_order.append(update.request_id)
                self.last_update[update.request_id] = update
        return outcome.updates

    def run(self, max_steps: int = 5000) -> None:
        """Steps until nothing is left; fails if that does not come."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.engine.load()}")

    def assert_idle(self) -> None:
        self.engine.check()
        assert not self.engine.has_work
        assert self.pool.num_free_blocks == self.pool.num_blocks

    def sequence(self, name: str) -> Sequence:
        sequence = self.scheduler.get(RequestId(name))
        assert sequence is not None, f"{name} has ended"
        return sequence


def make_world(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 200,
    max_queued_requests: int = 1000,
    max_queued_tokens: int | None = None,
    long_prefill_token_threshold: int | None = None,
    enable_prefix_caching: bool = True,
    force_preemption_every: int = 0,
    policy: SchedulingPolicy | None = None,
    model: FakeModel = MODEL,
    grammars: GrammarDesk | None = None,
    vocab_size: int = VOCAB_SIZE,
    eos_token_id: int = EOS,
    limits: StepLimits | None = None,
    async_scheduling: bool = False,
) -> World:
    """With `async_scheduling` a step is planned while the one before it computes."""
    kv_events: list[KvEvent] = []
    recorder = KvEventRecorder(block_size, kv_events.extend)
    pool = BlockPool(num_blocks, block_size, recorder)
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        eos_token_ids=frozenset({eos_token_id}),
        enable_prefix_caching=enable_prefix_caching,
        policy=policy,
        limits=limits,
        force_preemption_every=force_preemption_every,
    )
    runner = ListeningRunner(num_blocks, block_size, model=model)
    clock = ManualClock()
    engine = Engine(
        scheduler,
        runner,
        vocab_size=vocab_size,
        grammars=grammars,
        kv_events=recorder,
        execution=_overlap().execution() if async_scheduling else None,
        clock=clock,
    )
    return World(engine, scheduler, pool, runner, clock, kv_events=kv_events)


def make_sampling(max_tokens: int = 4, **options: Any) -> SamplingParams:
    values: dict[str, Any] = {"seed": 1, "temperature": 0.0, **options}
    return SamplingParams(max_tokens=max_tokens, **values)


def make_submit(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    output: tuple[int, ...] | list[int] = (),
    timeout_s: float | None = None,
    cache_salt: str = "",
    tenant: str = "acme",
    priority: int = 1,
    trace_context: dict[str, str] | None = None,
    shares_prompt_with: str | None = None,
    **sampling: Any,
) -> Submit:
    return Submit(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=make_sampling(max_tokens, **sampling),
        tenant=TenantId(tenant),
        priority=priority,
        timeout_s=timeout_s,
        cache_salt=cache_salt,
        trace_context=trace_context or {},
        output_token_ids=list(output),
        shares_prompt_with=RequestId(shares_prompt_with) if shares_prompt_with is not None else None,
    )


def make_prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that differ from those of any other start."""
    return [(start + index) % 900 for index in range(length)]


def expected_output(submit: Submit, model: FakeModel = MODEL) -> list[int]:
    """What the fake model says to a request that nothing disturbs and no stop token ends."""
    return model.generate(submit.prompt_token_ids, submit.sampling.max_tokens, submit.sampling)
