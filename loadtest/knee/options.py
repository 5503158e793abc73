"""What `headrace knee` can be asked to do. Imports nothing heavy, so that the command line is quick to
build."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.knee.slo import SloTier, parse_duration_s, parse_share, parse_slo, parse_tier
from loadtest.options import TRACE_NAMES, BenchServeOptions
from shared.errors import ConfigError

MIN_BUDGET_S = 20.0
MAX_CV = 10.0


@dataclass(frozen=True, slots=True)
class KneeOptions:
    """One call. `check()` validates what parsing has not."""

    load: BenchServeOptions  # URL, key, model and data set; its rates and counts are not used
    tiers: tuple[SloTier, ...] = ()
    cvs: tuple[float, ...] = (1.0,)
    budget_s: float = 300.0
    tolerance: float = 0.05
    validate: bool = False
    max_concurrency: int = 1024
    json_file: Path | None = None
    report_file: Path | None = None
    shows_progress: bool = True
    command_line: str = field(default="")

    def check(self) -> None:
        """Raises ConfigError, naming the flag, unless a search is possible with these options."""
        self.load.check()
        load = self.load
        if load.dataset_name in TRACE_NAMES:
            raise ConfigError(
                f"{load.dataset_name} has times of its own; a search makes its own", "--dataset-name"
            )
        if self.budget_s < MIN_BUDGET_S:
            raise ConfigError(f"must be at least {MIN_BUDGET_S:g}s, got {self.budget_s:g}s", "--budget")
        if not 0.005 <= self.tolerance <= 0.5:
            raise ConfigError(f"must be between 0.005 and 0.5, got {self.tolerance:g}", "--tolerance")
        if self.max_concurrency < 2:
            raise ConfigError(f"must be at least 2, got {self.max_concurrency}", "--max-concurrency")
        if self.json_file is not None and not self.json_file.resolve().parent.is_dir():
            raise ConfigError(f"there is no folder for {self.json_file}", "--json")
        if self.report_file is not None and not self.report_file.resolve().parent.is_dir():
            raise ConfigError(f"there is no folder for {self.report_file}", "--report")


def tiers_of(slo: str | None, tiers: Sequence[str], attainment: str) -> tuple[SloTier, ...]:
    """`--slo` alone, or any number of `--tier`. Raises ConfigError."""
    share = parse_share(attainment, "--attainment")
    if slo is not None and tiers:
        raise ConfigError("either that or --tier", "--slo")
    found = (parse_slo(slo, share),) if slo is not None else tuple(parse_tier(text, share) for text in tiers)
    names = [tier.name for tier in found]
    if len(set(names)) < len(names):
        raise ConfigError("every tier needs a name of its own", "--tier")
    return found


def cvs_of(text: str) -> tuple[float, ...]:
    """`1,2`. Raises ConfigError."""
    cvs = []
    for part in text.split(","):
        try:
            cv = float(part)
        except ValueError as error:
            raise ConfigError(f"{part.strip()!r} is not a number", "--cv") from error
        if not 0 <= cv <= MAX_CV or math.isnan(cv):
            raise ConfigError(f"must be between 0 and {MAX_CV:g}, got {part.strip()}", "--cv")
        cvs.append(cv)
    if len(set(cvs)) < len(cvs):
        raise ConfigError("every one only once", "--cv")
    return tuple(cvs)


def budget_of(text: str) -> float:
    """`300s`, or a bare number of seconds. Raises ConfigError."""
    text = text.strip()
    return parse_duration_s(text if text.endswith("s") else f"{text}s", "--budget")
