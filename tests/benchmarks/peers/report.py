"""The tables, in Markdown: ratios to the best peer, each case, memory and start, and whatever went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadtest.machine import Machine
from tests.benchmarks.peers.case import LARGEST, MEMORY, READY, WHOLE_LIFE, Case, Figure
from tests.benchmarks.peers.ceilings import Ceilings
from tests.benchmarks.peers.comparison import Spread, best_of, kept, lives, ratios, spreads
from tests.benchmarks.peers.contestant import MAX_TOKENS_CACHED, Absent
from tests.benchmarks.peers.measurement import Measurement

DISTURBED = "†"


@dataclass(frozen=True, slots=True)
class Background:
    """Where and how it was measured."""

    date: str
    machine: Machine
    instruction_set: str
    is_narrowed: bool  # the CPU has more than that
    num_threads: int
    commit: str | None
    torch: str
    ceilings: Ceilings | None
    versions: Sequence[tuple[str, str]]  # server, what it is
    absent: Sequence[Absent]
    num_rounds: int
    max_foreign_cores: float
    command: str


class Report:
    """`ours` and `peers` are names of servers, in the order of the rows."""

    def __init__(
        self,
        background: Background,
        cases: Sequence[Case],
        ours: Sequence[str],
        peers: Sequence[str],
        attempts: Sequence[Measurement],
    ) -> None:
        self._background = background
        self._cases = cases
        self._ours = ours
        self._peers = peers
        self._servers = [*ours, *peers]
        self._attempts = attempts
        self._kept = kept(attempts)
        self._figures = [*self._kept, *lives(attempts)]

    def text(self) -> str:
        parts = (
            self._heading(),
            self._ratio_table(),
            *(self._case_table(case) for case in self._cases),
            self._life_table(),
            self._failures(),
            self._disturbances(),
        )
        return "\n".join(line for part in parts for line in part)

    def _heading(self) -> Iterator[str]:
        about = self._background
        machine = about.machine
        memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 2**30:.0f} GiB"
        narrowed = ", since every server is shown a CPU without the rest" if about.is_narrowed else ""
        yield (
            f"{about.date}, commit {about.commit or 'unknown'}. {machine.cpu_model}, {machine.num_cores} "
            f"cores{memory}; instruction set: {about.instruction_set}{narrowed}; threads of a server: "
            f"{about.num_threads}; Python {machine.python}, torch {about.torch}."
        )
        if about.ceilings is not None:
            yield (
                "Ceilings (AVX2, best bursts just before): "
                f"{about.ceilings.read_gb_s:.1f} GB/s reading 1 GiB, "
                f"{about.ceilings.float32_gmac_s:.0f} GMAC/s in float32, "
                f"{about.ceilings.int16_gmac_s:.0f} in int16, "
                f"{about.ceilings.int8_gmac_s:.0f} in int8 with 4-bit weights."
            )
        yield (
            f"`{about.command}`; rounds: {about.num_rounds}, each with every server afresh, in turns. "
            "Greedy, `ignore_eos`, through HTTP, a connection for each request, tokens counted by `usage`, "
            "the client on the same cores. Cells: median "
            f"(lowest–highest), the best in bold. {DISTURBED}: in some round others took more than "
            f"{about.max_foreign_cores:g} cores in every attempt. Each server has room for "
            f"{MAX_TOKENS_CACHED:,} tokens of keys and values unless its configuration says otherwise."
        )
        yield ""
        yield from (f"- {server}: {version}" for server, version in about.versions)
        yield from (f"- {absent.family} takes no part: {absent.reason}" for absent in about.absent)
        yield ""

    def _ratio_table(self) -> Iterator[str]:
        places = [(case.name, figure) for case in self._cases for figure in case.compared]
        rows = [
            (
                case,
                f"{figure.title}, {figure.unit}",
                ratio.best_peer,
                number(ratio.best_median),
                ratio.ours,
                number(ratio.our_median),
                f"{ratio.times_better:.2f} ×",
            )
            for case, figure in [*places, (WHOLE_LIFE, MEMORY), (WHOLE_LIFE, LARGEST)]
            for ratio in ratios(self._spreads(case, figure), self._ours, self._peers, figure)
        ]
        if rows:
            yield "Headrace against the best peer of each case (above 1: Headrace is better):"
            yield ""
            yield from table(
                ("case", "figure", "best peer", "its median", "Headrace", "median", "better"), rows, {3, 5, 6}
            )
            yield ""

    def _case_table(self, case: Case) -> Iterator[str]:
        yield f"**{case.name}**: {case.description}"
        yield ""
        yield from self._figure_table(case.name, case.figures)

    def _life_table(self) -> Iterator[str]:
        yield "**Memory and start.** Proportional set size, peak over all cases"
        yield ""
        yield from self._figure_table(WHOLE_LIFE, (MEMORY, LARGEST, READY))

    def _figure_table(self, case: str, figures: Sequence[Figure]) -> Iterator[str]:
        columns = [(figure, self._spreads(case, figure)) for figure in figures]
        rows = []
        for server in self._servers:
            if any(server in found for _, found in columns):
                cells = [self._cell(server, found, figure) for figure, found in columns]
            else:
                cells = ["failed, see below", *[""] * (len(figures) - 1)]
            rows.append((server + self._mark(server, case), *cells))
        titles = ("server", *(f"{figure.title}, {figure.unit}" for figure in figures))
        yield from table(titles, rows, range(1, len(titles)))
        yield ""

    def _cell(self, server: str, found: Mapping[str, Spread], figure: Figure) -> str:
        if server not in found:
            return "n/a"
        spread = found[server]
        text = number(spread.median)
        if server == best_of(found, self._servers, figure):
            text = f"**{text}**"
        if spread.num_rounds == 1:
            return text
        return f"{text} ({number(spread.lowest)}–{number(spread.highest)})"

    def _failures(self) -> Iterator[str]:
        failed = [each for each in self._kept if each.error is not None]
        if failed:
            yield "**Failures.** A server that failed in one round has no figures of that case"
            yield ""
            for each in failed:
                yield f"- round {each.round_number}, {each.server}, {each.case}: {each.error}"
            yield ""

    def _disturbances(self) -> Iterator[str]:
        disturbed = [each for each in self._attempts if self._is_disturbed(each)]
        if disturbed:
            yield "**Runs that others disturbed**"
            yield ""
            for each in disturbed:
                counted = ", counted all the same" if each in self._kept else ""
                yield (
                    f"- round {each.round_number}, {each.server}, {each.case}, attempt {each.attempt}: "
                    f"{each.foreign_cores:.2f} cores{counted}"
                )
            yield ""

    def _spreads(self, case: str, figure: Figure) -> dict[str, Spread]:
        return spreads(self._figures, case, figure, self._background.num_rounds)

    def _mark(self, server: str, case: str) -> str:
        is_disturbed = any(
            each.server == server and each.case == case and self._is_disturbed(each) for each in self._kept
        )
        return f" {DISTURBED}" if is_disturbed else ""

    def _is_disturbed(self, measurement: Measurement) -> bool:
        return (measurement.foreign_cores or 0.0) > self._background.max_foreign_cores


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> Iterator[str]:
    """In Markdown; the columns `right` are aligned there."""
    aligned = set(right)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join('---:' if column in aligned else '---' for column in range(len(titles)))}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
