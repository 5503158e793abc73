"""The limits that keep a target for the inter-token latency: the real scheduler on simulated machines."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import pytest

from engine_service.block_pool import BlockPool
from engine_service.fake_model import load_fake_model
from engine_service.runner import RowResults, Sampled
from engine_service.scheduler import Scheduler
from engine_service.sequence import Sequence, StepPlan
from engine_service.served_model import build_engine
from engine_service.step_time_target import StepTimeTarget
from shared.config import ModelConfig
from shared.identifiers import RequestId, TenantId
from shared.messages import EngineLoad
from shared.sampling import SamplingParams
from tests.unit.worlds import make_submit

BLOCK_SIZE = 16
MAX_NUM_TOKENS = 512
TARGET_S = 0.1
P95_OF_NOISE = 1.645  # standard deviations


@dataclass(frozen=True)
class Machine:
    """What steps truly take. `curve_s` is of the tokens of a step."""

    curve_s: Callable[[int], float]
    per_attended_token_s: float = 2e-7  # by decoding rows
    per_pair_s: float = 1.5e-7  # by rows of prompts

    def step_s(self, contexts: list[int], chunks: list[tuple[int, int]]) -> float:
        """Of rows that decode at `contexts` and chunks (start, number of tokens)."""
        num_tokens = len(contexts) + sum(size for _, size in chunks)
        pairs = sum(size * (start + size / 2) for start, size in chunks)
        return self.curve_s(num_tokens) + sum(contexts) * self.per_attended_token_s + pairs * self.per_pair_s


def _steep_at_first(num_tokens: int) -> float:
    """A matrix product that is slow for few rows, as measured on CPUs."""
    return 0.02 + min(0.03, 0.003 * num_tokens) + 0.0005 * num_tokens


LINEAR = Machine(lambda num_tokens: 0.02 + 0.0005 * num_tokens)
KINKED = Machine(lambda num_tokens: max(0.03, 0.0006 * num_tokens))  # memory up to 50 tokens, then arithmetic
STEEP = Machine(_steep_at_first)
MACHINES = pytest.mark.parametrize("machine", [LINEAR, KINKED, STEEP], ids=["linear", "kinked", "steep"])


@dataclass(frozen=True)
class Step:
    """One simulated step. `best_tokens` is the largest budget with which it would have kept the target."""

    number: int
    num_decoding: int
    num_tokens: int
    limit_tokens: int
    limit_seqs: int
    duration_s: float
    best_tokens: int

    @property
    def mixes(self) -> bool:
        return 0 < self.num_decoding < self.num_tokens

    @property
    def is_missed(self) -> bool:
        return self.num_decoding > 0 and self.duration_s > TARGET_S


@dataclass
class Simulation:
    """A scheduler whose steps take what the machine says, `speed_of` the step's number times."""

    machine: Machine
    max_num_seqs: int = 64
    noise: float = 0.0  # standard deviation of the logarithm of a step's time
    hiccups: float = 0.0  # share of steps that take ten times as long
    slowness_of: Callable[[int], float] = lambda number: 1.0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limits = StepTimeTarget(
            target_itl_s=TARGET_S,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            min_chunk_tokens=BLOCK_SIZE,
        )
        self.scheduler = Scheduler(
            BlockPool(8192, BLOCK_SIZE),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            max_model_len=16_384,
            max_queued_requests=100_000,
            enable_prefix_caching=False,
            limits=self.limits,
        )
        self._random = random.Random(7)
        self._ids = count()

    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.scheduler.add(
            Sequence(
                request_id=RequestId(str(next(self._ids))),
                token_ids=[1] * num_prompt_tokens,
                num_prompt_tokens=num_prompt_tokens,
                sampling=SamplingParams(max_tokens=max_tokens, seed=1),
                tenant=TenantId("acme"),
            )
        )

    def run(self, num_steps: int) -> list[Step]:
        """Makes steps and returns them."""
        for _ in range(num_steps):
            plan = self.scheduler.schedule()
            assert plan is not None, "nothing to compute"
            step = self._time(plan)
            self.limits.observe(plan, step.duration_s)
            self.scheduler.update(
                plan, RowResults([Sampled(1) if row.samples else None for row in plan.rows])
            )
            self.steps.append(step)
        return self.steps[-num_steps:]

    def _time(self, plan: StepPlan) -> Step:
        number = len(self.steps)
        contexts: list[int] = []
        chunks: list[tuple[int, int]] = []
        for row in plan.rows:
            if row.start >= row.sequence.num_prompt_tokens:
                contexts.append(row.start + 1)
            else:
                chunks.append((row.start, row.num_tokens))
        slowness = self.slowness_of(number)
        duration_s = slowness * self.machine.step_s(contexts, chunks)
        duration_s *= self._random.lognormvariate(0, self.noise)
        duration_s *= 10 if self._random.random() < self.hiccups else 1
        start = chunks[0][0] if chunks else 0
        tail = slowness * math.exp(P95_OF_NOISE * self.noise)

        def tail_s(size: int) -> float:
            return tail * self.machine.step_s(contexts, [(start, size)])

        best_chunk = bisect_right(range(1, MAX_NUM_TOKENS - len(contexts) + 1), TARGET_S, key=tail_s)
        report = self.limits.report()
        return Step(
            number, len(contexts), plan.num_tokens, report.max_num_tokens, report.max_num_seqs,
            duration_s, len(contexts) + best_chunk,
        )  # fmt: skip


def results_of(plan: StepPlan) -> RowResults:
    return RowResults([Sampled(1) if row.samples else None for row in plan.rows])


def share(steps: Iterable[Step], has: Callable[[Step], bool]) -> float:
    steps = list(steps)
    assert steps, "no steps to judge"
    return sum(map(has, steps)) / len(steps)


def mean_use(steps: Iterable[Step]) -> float:
    """How much of the best budget the limit allowed, where a prompt was there to use it."""
    uses = [step.limit_tokens / step.best_tokens for step in steps if step.mixes]
    assert uses, "no steps to judge"
    return sum(uses) / len(uses)


def run_chat(simulation: Simulation, num_steps: int, *, every: int = 40) -> list[Step]:
    """Prompts of 400 tokens that come one by one and are answered with 200: some five decode at a time."""
    made: list[Step] = []
    for number in range(num_steps):
        if number % every == 0:
            simulation.add(400, 200)
        made += simulation.run(1)
    return made


@pytest.mark.parametrize(
    ("machine", "least_use"),
    [(LINEAR, 0.95), (KINKED, 0.95), (STEEP, 0.7)],
    ids=["linear", "kinked", "steep"],
)
def test_the_budget_comes_near_the_best_and_does_not_exceed_it(machine: Machine, least_use: float) -> None:
    """On the steep machine a line through the few tokens of pure decoding foretells chunks badly."""
    simulation = Simulation(machine)
    run_chat(simulation, 800)
    settled = run_chat(simulation, 400)
    assert mean_use(settled) > least_use
    assert share(settled, lambda step: step.is_missed) < 0.02
    assert max(step.duration_s for step in settled if step.num_decoding) < 1.1 * TARGET_S


@MACHINES
def test_before_it_knows_the_machine_no_step_takes_twice_the_target(machine: Machine) -> None:
    simulation = Simulation(machine)
    first = run_chat(simulation, 100)
    assert max(step.duration_s for step in first if step.num_decoding) < 2 * TARGET_S
    assert share(first, lambda step: step.is_missed) < 0.05


@MACHINES
def test_noise_and_hiccups_leave_nineteen_of_twenty_steps_within_the_target(machine: Machine) -> None:
    simulation = Simulation(machine, noise=0.1, hiccups=0.02)
    run_chat(simulation, 300)
    settled = run_chat(simulation, 1500)
    assert share(settled, lambda step: step.is_missed) < 0.05
    assert share((step for step in settled if step.mixes), lambda step: step.is_missed) < 0.12
    assert mean_use(settled) > 0.75


def test_one_hiccup_costs_little_and_is_soon_forgotten() -> None:
    simulation = Simulation(LINEAR)
    simulation.add(16, 2000)
    run_chat(simulation, 300)
    before = simulation.limits.max_num_tokens(8)
    simulation.slowness_of = lambda number: 50.0 if number == 300 else 1.0
    simulation.run(1)
    assert simulation.limits.max_num_tokens(8) > 0.75 * before
    simulation.run(5)
    assert simulation.limits.max_num_tokens(8) > 0.9 * before


def test_a_machine_that_slows_down_threefold_is_followed_and_so_is_its_recovery() -> None:
    simulation = Simulation(Machine(lambda n: 0.005 + 0.0005 * n), noise=0.05)
    simulation.slowness_of = lambda number: 3.0 if 400 <= number < 800 else 1.0
    run_chat(simulation, 400)
    slow = run_chat(simulation, 400)
    recovered = run_chat(simulation, 400)
    assert sum(step.is_missed for step in slow[:60]) < 12, "for as long as it takes to believe it"
    assert share(slow[60:], lambda step: step.is_missed) < 0.05
    assert mean_use(slow[150:]) > 0.75
    assert share(recovered, lambda step: step.is_missed) < 0.05
    assert mean_use(recovered[:60]) > 0.6
    assert mean_use(recovered[150:]) > 0.85


def test_after_it_was_slow_the_chunk_grows_again_without_overshooting() -> None:
    simulation = Simulation(Machine(lambda n: 0.01 + 0.0005 * n))
    simulation.slowness_of = lambda number: 5.0 if number < 200 else 1.0
    simulation.add(16, 3000)
    simulation.run(20)
    simulation.add(12_000, 10)
    while len(simulation.steps) < 200:
        simulation.run(1)
    assert simulation.steps[-1].limit_tokens < 30
    grown = simulation.run(25)
    assert max(step.duration_s for step in grown) < 1.2 * TARGET_S
    assert grown[-1].limit_tokens > 0.9 * grown[-1].best_tokens


def test_chunks_shrink_as_the_context_of_a_long_prompt_grows() -> None:
    simulation = Simulation(LINEAR)
    for _ in range(4):
        simulation.add(100, 1000)
    simulation.run(60)
    simulation.add(8000, 10)
    steps = [step for step in simulation.run(200) if step.mixes]
    assert sum(step.num_tokens - step.num_decoding for step in steps) == 8000
    assert steps[20].limit_tokens > 1.5 * steps[-2].limit_tokens
    assert share(steps, lambda step: step.is_missed) < 0.1
    assert mean_use(steps[10:]) > 0.9


def test_what_one_long_prompt_has_taught_serves_the_next_one_from_its_first_chunk() -> None:
    """Its first chunks attend to little, so they can be larger than the last ones of the prompt before."""
    simulation = Simulation(LINEAR)
    simulation.add(16, 8000)
    simulation.run(20)
    for number in range(3):
        simulation.add(8000, 1)
        steps = []
        while not steps or steps[-1].mixes:
            steps += simulation.run(1)
        assert number == 0 or mean_use(steps[:6]) > 0.9
        simulation.run(50)


def test_arithmetic_that_alone_becomes_dearer_is_followed_after_any_time() -> None:
    simulation = Simulation(LINEAR)
    run_chat(simulation, 1500)
    simulation.machine = Machine(lambda num_tokens: 0.02 + 0.0015 * num_tokens)
    settled = run_chat(simulation, 600)[300:]
    assert share((step for step in settled if step.mixes), lambda step: step.is_missed) < 0.1
    assert mean_use(settled) > 0.8


def test_frequent_hiccups_do_not_ruin_the_throughput() -> None:
    simulation = Simulation(Machine(lambda num_tokens: 0.005 + 0.0005 * num_tokens), hiccups=0.15)
    run_chat(simulation, 300)
    settled = [step for step in run_chat(simulation, 300) if step.mixes]
    assert sum(step.limit_tokens - step.num_decoding for step in settled) / len(settled) > 2 * BLOCK_SIZE


@MACHINES
def test_as_many_sequences_run_as_can_decode_beside_a_block_of_a_prompt(machine: Machine) -> None:
    simulation = Simulation(machine, max_num_seqs=256)
    for _ in range(600):
        simulation.add(16, 300)
    simulation.run(300)
    times_s = []
    for _ in range(20):
        simulation.run(10)
        contexts = [s.num_computed_tokens for s in simulation.scheduler.sequences() if s.block_ids]
        times_s.append(machine.step_s(contexts, [(0, BLOCK_SIZE)]))
    assert len(contexts) < 200, "the target is what limits it"
    assert share(simulation.steps[-200:], lambda step: step.is_missed) < 0.05
    assert 0.9 * TARGET_S < sum(times_s) / len(times_s) < 1.01 * TARGET_S


def test_a_target_that_one_sequence_misses_leaves_the_least_and_is_told() -> None:
    simulation = Simulation(Machine(lambda num_tokens: 0.12 + 0.0005 * num_tokens))
    for _ in range(3):
        simulation.add(100, 50)
    simulation.run(45)
    report = simulation.limits.report()
    assert (report.max_num_seqs, report.meets_target) == (1, False)
    assert report.decode_step_p95_ms > 120
    assert simulation.limits.max_num_tokens(3) == 3 + BLOCK_SIZE
    assert simulation.limits.max_num_tokens(0) == MAX_NUM_TOKENS


def test_a_prompt_gets_a_block_beside_a_batch_that_is_too_large_already() -> None:
    simulation = Simulation(LINEAR, slowness_of=lambda number: 1.0 if number < 100 else 4.0)
    for _ in range(6):
        simulation.add(50, 400)
    simulation.run(100)
    simulation.run(60)
    simulation.add(160, 10)
    assert simulation.limits.max_num_tokens(6) == 6 + BLOCK_SIZE
    assert simulation.limits.max_num_seqs < 7, "though it is not admitted before one of them has ended"


def test_a_step_in_which_nobody_decodes_may_use_everything() -> None:
    simulation = Simulation(LINEAR)
    simulation.add(2000, 20)
    assert [step.num_tokens for step in simulation.run(3)] == [MAX_NUM_TOKENS] * 3
    assert share(simulation.run(10), lambda step: step.is_missed) == 0


def test_the_report_is_of_the_last_hundred_steps_that_decode() -> None:
    simulation = Simulation(
        Machine(lambda num_tokens: 0.05), slowness_of=lambda number: 3 if number < 96 else 1
    )
    assert simulation.limits.report().meets_target, "nothing was missed yet"
    simulation.add(10, 1000)
    simulation.run(100)
    assert not simulation.limits.report().meets_target
    simulation.run(90)
    assert not simulation.limits.report().meets_target, "six of a hundred are too many"
    simulation.run(1)
    report = simulation.limits.report()
    assert report.meets_target
    assert report.decode_step_p95_ms == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_teaches_nothing(duration_s: float) -> None:
    simulation = Simulation(LINEAR)
    run_chat(simulation, 100)
    plan = simulation.scheduler.schedule()
    assert plan is not None
    before = simulation.limits.max_num_tokens(3), simulation.limits.report()
    simulation.limits.observe(plan, duration_s)
    assert (simulation.limits.max_num_tokens(3), simulation.limits.report()) == before


def test_whatever_a_clock_says_the_limits_stay_within_their_bounds() -> None:
    source = random.Random(3)
    for max_num_seqs, max_num_tokens in ((1, 1), (4, 8), (64, 512)):
        limits = StepTimeTarget(
            target_itl_s=TARGET_S,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_tokens,
            min_chunk_tokens=BLOCK_SIZE,
        )
        scheduler = Scheduler(
            BlockPool(1024, BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_tokens,
            max_model_len=2000,
            max_queued_requests=1000,
            limits=limits,
        )
        for number in range(150):
            prompt = [source.randrange(100) for _ in range(source.randrange(1, 150))]
            sampling = SamplingParams(max_tokens=source.randrange(1, 20), seed=1)
            name = RequestId(str(number))
            scheduler.add(Sequence(name, prompt, len(prompt), sampling, TenantId("acme")))
            plan = scheduler.schedule()
            assert plan is not None
            odd = source.choice([0.0, -1.0, math.inf, math.nan, 1e-9, 1e9])
            limits.observe(plan, odd if source.random() < 0.5 else source.random())
            scheduler.update(plan, RowResults([Sampled(1) if row.samples else None for row in plan.rows]))
            assert 1 <= limits.max_num_seqs <= max_num_seqs
            for num_decoding in (0, 1, 3, max_num_seqs):
                num_tokens = limits.max_num_tokens(num_decoding)
                assert min(num_decoding + BLOCK_SIZE, max_num_tokens) <= num_tokens <= max_num_tokens


def test_a_configured_target_reaches_the_engine_whose_load_tells_what_becomes_of_it() -> None:
    def load_after(target_itl_ms: float | None) -> EngineLoad:
        config = ModelConfig(name="m", source="fake:step_delay_ms=2", target_itl_ms=target_itl_ms)
        engine = build_engine(config, load_fake_model(config))
        engine.add(make_submit("a", [1, 2, 3], max_tokens=10))
        while engine.has_work:
            engine.step()
        engine.close()
        return engine.load()

    missed = load_after(0.5)
    assert (missed.max_num_seqs_now, missed.max_num_tokens_now) == (1, 1 + BLOCK_SIZE)
    assert missed.meets_itl_target is False
    assert missed.decode_step_p95_ms >= 2
    assert load_after(60_000).meets_itl_target is True
    fixed = load_after(None)
    assert (fixed.max_num_seqs_now, fixed.max_num_tokens_now) == (
        64,
        ModelConfig.model_fields["max_num_batched_tokens"].default,
    )
    assert fixed.meets_itl_target is None
