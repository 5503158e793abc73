"""How long prompts and answers were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadtest.report.chart import Cell, Chart, legend, new_figure
from loadtest.report.theme import Theme

NUM_BINS = 40
WIDE = 5  # lengths that differ by more are on a logarithmic axis


def length_chart(
    lengths: Mapping[str, Sequence[int]], failed_share: float, asked: Mapping[str, float] | None = None
) -> Chart | None:
    """`lengths` by what they are of; `asked`: means that the workload was to have. None if all are empty."""
    asked = asked or {}
    known = {name: np.asarray(values) for name, values in lengths.items() if len(values)}
    if not known:
        return None
    low = min(int(values.min()) for values in known.values())
    high = max(int(values.max()) for values in known.values())
    edges = np.unique(np.geomspace(max(1, low), max(2, high) + 1, NUM_BINS).round())
    counts = {name: np.histogram(values, edges)[0] for name, values in known.items()}
    rows: list[list[Cell]] = [[f"{name}, asked", tokens, tokens, None] for name, tokens in asked.items()]
    rows += [
        [name, float(begin), float(end), int(count)]
        for name, values in counts.items()
        for begin, end, count in zip(edges[:-1], edges[1:], values, strict=True)
    ]

    def draw(theme: Theme) -> Any:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        figure, (panel,) = new_figure(theme, 3.0)
        for number, (name, values) in enumerate(counts.items()):
            panel.stairs(
                100 * values / values.sum(), edges, color=theme.series(number), linewidth=1.5,
                linestyle=("-", "--", ":")[number % 3],
                label=f"{name}\n(median {np.median(known[name]):,.0f})",
            )  # fmt: skip
        for number, (name, tokens) in enumerate(asked.items()):
            panel.axvline(
                tokens, color=theme["faint"], linewidth=1.2, linestyle=("-", "--")[number % 2],
                label=f"{name}\n(asked: {tokens:,.0f})",
            )  # fmt: skip
        if high > WIDE * low:
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_ylim(bottom=0)
        panel.set_xlabel("length (tokens)")
        panel.set_ylabel("requests (%)")
        legend(panel, theme)
        return figure

    return Chart(
        name="lengths",
        title="Lengths of prompts and answers",
        caption=(
            "As the server counted them, and as asked for where the file says so"
            f"{'; on a logarithmic axis' if high > WIDE * low else ''}. Answers "
            f"of failed requests ({100 * failed_share:.2g} %) have no length and are left out."
        ),
        draw=draw,
        header=["of", "tokens_from", "tokens_below", "requests"],
        rows=rows,
    )
