"""What `headrace knee` can be asked to do. Imports nothing heavy, so that the command line is quick to
build."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.knee.slo import SloTier, parse_share, parse_slo, parse_tier
from loadtest.options import TRACE_NAMES, BenchServeOptions
from loadtest.server_url import basic_authorization, check_server_url
from shared.errors import ConfigError

MIN_BUDGET_S = 20.0
MAX_CV = 10.0
BUDGET_UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|)")


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
        load = self.load
        if load.base_url is not None:  # here, as this command calls it --url
            check_server_url(load.base_url, "--url")
            names = {name.lower() for name in load.headers}
            if basic_authorization(load.base_url) and (load.api_key is not None or "authorization" in names):
                raise ConfigError(
                    "has a name and password, and there is an API key (HEADRACE_API_KEY is one) or an "
                    "Authorization header too; leave one out",
                    "--url",
                )
        load.check()
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
        _check_writable(self.json_file, "--json")
        _check_writable(self.report_file, "--report")
        if (
            self.json_file is not None
            and self.report_file is not None
            and self.json_file.resolve() == self.report_file.resolve()
        ):
            raise ConfigError("the same file as --json", "--report")


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
    """`300s`, `5m`, `1h`, or a bare number of seconds. Raises ConfigError."""
    found = _BUDGET.fullmatch(text.strip())
    seconds = float(found[1]) * BUDGET_UNITS_S[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{text.strip()!r} is not a duration above zero, like 300s, 5m or 1h", "--budget")
    return seconds


def _check_writable(path: Path | None, flag: str) -> None:
    """Before the search, whose minutes would be lost otherwise."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a file", flag)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder for {path}", flag)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written", flag)
