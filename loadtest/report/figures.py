"""Whether the figures of a search can be read at all: files are also edited by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from loadtest.knee.probe import Probe
from loadtest.knee.result import KneeResult, SloRow
from shared.errors import ConfigError

SLACK_S = 0.001  # clocks of several processes, and what rounding leaves


def check_figures(result: KneeResult, path: Path) -> None:
    """Raises ConfigError with the first that no search writes, like a time before the begin, a limit of 0."""
    wrong = next(_wrong_figures(result), None)
    if wrong is not None:
        raise ConfigError(f"{path} is not a whole result of `headrace knee`: {wrong}")


def _wrong_figures(result: KneeResult) -> Iterator[str]:
    for number, row in enumerate(result.slo):
        yield from _of_slo(f"slo[{number}]", row)
    for number, tier in enumerate(result.tiers):
        yield from _of_slo(f"tiers[{number}].slo", tier.slo)
    for number, probe in enumerate(result.probes):
        yield from _of_probe(f"probes[{number}]", probe)


def _of_slo(where: str, row: SloRow) -> Iterator[str]:
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        limit = getattr(row, name)
        if limit is not None and not 0 < limit < math.inf:
            yield f"{where}.{name} is {limit:g}, not a time above 0"
    if not 0 < row.attainment <= 1:
        yield f"{where}.attainment is {row.attainment:g}, not a share"


def _of_probe(where: str, probe: Probe) -> Iterator[str]:
    if probe.rate is not None and not 0 < probe.rate < math.inf:
        yield f"{where}.rate is {probe.rate:g}, not a rate above 0"
    if probe.cv is not None and not 0 <= probe.cv < math.inf:
        yield f"{where}.cv is {probe.cv:g}"
    for name in ("begin_s", "warm_cut_s", "end_s", "drained_s"):
        if not 0 <= getattr(probe, name) < math.inf:
            yield f"{where}.{name} is {getattr(probe, name):g}, not a time from 0 on"
    for place, one in enumerate(probe.requests):
        if not -SLACK_S <= one.due_s < math.inf:
            yield f"{where}.requests.due_s[{place}] is {one.due_s:g}, not a time from 0 on"
        for name in ("sent_s", "first_token_s", "end_s"):
            at_s = getattr(one, name)
            if at_s is not None and not one.due_s - SLACK_S <= at_s < math.inf:
                yield f"{where}.requests.{name}[{place}] is {at_s:g}, before the request was due"
        for name in ("num_prompt_tokens", "num_output_tokens"):
            count = getattr(one, name)
            if count is not None and count < 0:
                yield f"{where}.requests.{name}[{place}] is {count}"
