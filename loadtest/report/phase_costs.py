"""What a search spent its time on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.knee.result import Phase
from loadtest.report.chart import Chart, new_figure
from loadtest.report.theme import Theme


def phase_chart(phases: Sequence[Phase], seconds_spent: float, budget_s: float) -> Chart | None:
    """Phases of one name are one bar. None without phases."""
    seconds: dict[str, float] = {}
    for phase in phases:
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
    if not seconds:
        return None
    names = list(seconds)

    def draw(theme: Theme) -> Any:
        figure, (panel,) = new_figure(theme, 0.34 * len(names) + 0.9)
        panel.barh(names, [seconds[name] for name in names], color=theme.series(0), height=0.6)
        for place, name in enumerate(names):
            panel.text(
                seconds[name], place, f" {seconds[name]:.3g} s", va="center", fontsize=9, color=theme["ink"]
            )
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.grid(visible=False, axis="y")
        panel.set_xlabel("time (s)")
        return figure

    return Chart(
        name="phases",
        title="What the time went into",
        caption=f"{seconds_spent:.0f} s in all, out of a budget of {budget_s:.0f} s.",
        draw=draw,
        header=["phase", "seconds"],
        rows=[[name, seconds[name]] for name in names],
    )
