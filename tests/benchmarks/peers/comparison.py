"""Medians, spreads, the best peer and the ratios to it. Pure: measurements in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.peers.case import LARGEST, MEMORY, READY, WHOLE_LIFE, Figure
from tests.benchmarks.peers.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    lowest: float
    highest: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """`times_better` is above 1 where `ours` is better than every peer, whichever way the figure points."""

    figure: Figure
    ours: str
    our_median: float
    best_peer: str
    best_median: float
    times_better: float


def kept(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One for each server, case and round: of several attempts the one that others disturbed least.

    An attempt without an error comes before all that have one.
    """
    best: dict[tuple[str, str, int], Measurement] = {}
    for each in measurements:
        place = (each.server, each.case, each.round_number)
        if place not in best or _order(each) < _order(best[place]):
            best[place] = each
    return list(best.values())


def lives(measurements: Iterable[Measurement]) -> list[Measurement]:
    """What is about a server and not about a case: for each round the measurement of a case named WHOLE_LIFE.

    The peak of memory is the highest of all that its cases saw, of disturbed attempts and failed ones, too.
    """
    highest: dict[tuple[str, int], dict[str, float]] = {}
    for each in measurements:
        if each.figures:
            life = highest.setdefault((each.server, each.round_number), {})
            for figure in (MEMORY, LARGEST, READY):
                if figure.key in each.figures:
                    life[figure.key] = max(life.get(figure.key, 0.0), each.figures[figure.key])
    return [
        Measurement(server, round_number, WHOLE_LIFE, figures=figures)
        for (server, round_number), figures in highest.items()
    ]


def spreads(
    measurements: Iterable[Measurement], case: str, figure: Figure, num_rounds: int
) -> dict[str, Spread]:
    """Of each server that did the case in every round; one error, and its figures say nothing."""
    values: dict[str, list[float]] = {}
    for each in measurements:
        if each.case == case and each.error is None and figure.key in each.figures:
            values.setdefault(each.server, []).append(each.figures[figure.key])
    return {
        server: Spread(statistics.median(found), min(found), max(found), len(found))
        for server, found in values.items()
        if len(found) == num_rounds
    }


def best_of(found: Mapping[str, Spread], servers: Iterable[str], figure: Figure) -> str | None:
    """The server with the best median; None if none of them has one."""
    able = [server for server in servers if server in found]
    if not able:
        return None
    choose = max if figure.higher_is_better else min
    return choose(able, key=lambda server: found[server].median)


def ratios(
    found: Mapping[str, Spread], ours: Sequence[str], peers: Sequence[str], figure: Figure
) -> list[Ratio]:
    """Each of ours against the best peer; empty where there is no peer to compare with."""
    best = best_of(found, peers, figure)
    if best is None:
        return []
    best_median = found[best].median
    compared = []
    for server in ours:
        if server in found:
            median = found[server].median
            numerator, denominator = (
                (median, best_median) if figure.higher_is_better else (best_median, median)
            )
            times_better = numerator / denominator if denominator else float("inf")
            compared.append(Ratio(figure, server, median, best, best_median, times_better))
    return compared


def _order(measurement: Measurement) -> tuple[bool, float]:
    foreign = measurement.foreign_cores
    return measurement.error is not None, float("inf") if foreign is None else foreign
