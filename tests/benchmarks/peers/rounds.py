"""The order of it all: rounds, in each every server afresh, on each server every case.

The order of the servers moves on by one from round to round, so that none always comes first, when the
machine is cool, or behind the same neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.case import CASES, Case
from tests.benchmarks.peers.client import measure
from tests.benchmarks.peers.contestant import Contestant
from tests.benchmarks.peers.measurement import Measurement
from tests.benchmarks.peers.process_tree import MemorySampler
from tests.benchmarks.peers.server import Server, ServerFailedError, running


@dataclass(frozen=True, slots=True)
class Plan:
    contestants: Sequence[Contestant]
    cases: Sequence[Case]
    num_rounds: int
    num_tries: int
    max_foreign_cores: float
    num_threads: int
    limits: Mapping[str, str]  # environment variables that keep to an instruction set
    ready_timeout_s: float
    case_timeout_s: float
    seed: int
    folder: Path  # logs and the client's files


def run_rounds(plan: Plan, say: Callable[[str], None]) -> Iterator[Measurement]:
    """Every attempt of everything, as it comes; a server that failed has an error in each case it missed."""
    for round_number in range(1, plan.num_rounds + 1):
        for contestant in in_turn(plan.contestants, round_number):
            say(f"round {round_number} of {plan.num_rounds}: {contestant.name}")
            yield from _measure_server(plan, contestant, round_number, say)


def in_turn(contestants: Sequence[Contestant], round_number: int) -> list[Contestant]:
    first = (round_number - 1) % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def nonce_of(seed: int, round_number: int, case: Case, attempt: int) -> int:
    """The same for every server, and another one for whatever the same server is asked next: it knows the
    prompts that it was sent before.
    """
    return ((seed * 1000 + round_number) * 100 + list(CASES).index(case.name)) * 100 + attempt


def _measure_server(
    plan: Plan, contestant: Contestant, round_number: int, say: Callable[[str], None]
) -> Iterator[Measurement]:
    folder = plan.folder / f"round{round_number}-{contestant.name}"
    done: set[str] = set()
    try:
        with (
            running(contestant, folder, plan.num_threads, plan.limits, plan.ready_timeout_s) as server,
            MemorySampler(server.pid) as memory,
        ):
            say(f"  ready after {server.ready_s:.1f} s")
            for case in plan.cases:
                for measurement in _measure_case(plan, server, memory, case, contestant.name, round_number):
                    say(f"  {_told(measurement)}")
                    yield measurement
                done.add(case.name)
    except ServerFailedError as error:
        say(f"  {contestant.name}: {error}")
        for case in plan.cases:
            if case.name not in done:
                yield Measurement(contestant.name, round_number, case.name, error=f"server: {error}")


def _measure_case(
    plan: Plan, server: Server, memory: MemorySampler, case: Case, name: str, round_number: int
) -> Iterator[Measurement]:
    """Until nobody disturbed it, or the tries are used up. An error is not tried again: it is a finding."""
    for attempt in range(1, plan.num_tries + 1):
        measurement = measure(
            server,
            memory,
            case,
            name,
            round_number,
            attempt,
            nonce=nonce_of(plan.seed, round_number, case, attempt),
            folder=server.log.parent,
            timeout_s=plan.case_timeout_s,
        )
        yield measurement
        if measurement.error or (measurement.foreign_cores or 0.0) <= plan.max_foreign_cores:
            return


def _told(measurement: Measurement) -> str:
    foreign = "" if measurement.foreign_cores is None else f", others {measurement.foreign_cores:.2f} cores"
    if measurement.error:
        return f"{measurement.case}: {measurement.error}{foreign}"
    figures = measurement.figures
    shown = [
        f"{figures[key]:.4g} {unit}"
        for key, unit in (
            ("output_tokens_per_s", "output tok/s"),
            ("ttft_p50_ms", "ms TTFT"),
            ("tpot_p50_ms", "ms TPOT"),
            ("peak_memory_mib", "MiB"),
        )
        if key in figures
    ]
    return f"{measurement.case}: {', '.join(shown)}{foreign}"
