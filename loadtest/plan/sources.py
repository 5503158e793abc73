"""Reads the measurements of a plan, and refuses those that nothing should be planned from."""

from __future__ import annotations

from pathlib import Path

from loadtest.knee.result import read_result
from loadtest.plan.measurement import Measurement, choose_tier, has_capacity, measure, why_unusable
from loadtest.report.figures import check_figures
from loadtest.report.words import beyond_probes
from shared.errors import ConfigError


def read_measurement(
    path: Path,
    tier: str | None,
    cv: float | None,
    *,
    force: bool,
    warnings: list[str],
    like: Measurement | None = None,
) -> Measurement:
    """Raises ConfigError with the reason; with `force`, the reason becomes a warning.

    `like`: another one that it will be set against, which makes sense for one promise only.
    """
    result = read_result(path)
    check_figures(result, path)
    chosen = choose_tier(result, tier, cv)
    reason = why_unusable(result, chosen)
    if reason is None and like is not None and chosen.slo != like.tier.slo:
        reason = f"its promise {chosen.name!r} is another one than that of the first file"
    if reason is not None:
        can_be_forced = has_capacity(chosen)
        if not force or not can_be_forced:
            hint = " (--force does it all the same)" if can_be_forced else ""
            raise ConfigError(f"{path} is nothing to plan from: {reason}{hint}")
        warnings.append(f"{path.name} is nothing to plan from: {reason}")
    elif chosen.status == "unresolved":
        warnings.append(
            f"the search of {path.name} did not settle; the plan rests on the lower end of a wide interval"
        )
    beyond = beyond_probes(chosen, result)
    if beyond is not None:
        warnings.append(f"the capacity in {path.name}: {beyond}")
    return measure(result, chosen)


def read_other_cvs(measured: Measurement) -> list[Measurement]:
    """The same promise under the other arrival laws of the same search, where these gave a capacity."""
    result = measured.result
    return [
        measure(result, tier)
        for tier in result.tiers
        if tier.name == measured.tier.name
        and tier.arrival_cv != measured.tier.arrival_cv
        and why_unusable(result, tier) is None
    ]
