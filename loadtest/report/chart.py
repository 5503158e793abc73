"""A picture and the numbers in it: drawn for a page or for a PNG, or written as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.report.theme import PAGE, PRINTED, Theme, with_variables
from shared.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_IN = 8.0
PNG_DPI = 150
FONTS = "system-ui, sans-serif"

Cell = float | int | str | None


@dataclass(frozen=True, slots=True)
class Chart:
    """`draw` makes the figure in the colours of a theme; `header` and `rows` are all that it shows."""

    name: str  # of its files
    title: str
    caption: str
    draw: Callable[[Theme], Figure]
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def new_figure(theme: Theme, height_in: float, **grid: Any) -> tuple[Figure, list[Any]]:
    """A figure and its panels, from the top; `grid` is matplotlib's, as for `Figure.subplots`."""
    from matplotlib.figure import Figure  # local: seconds, which only a report that is drawn costs

    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=theme["back"], layout="constrained")
    panels = figure.subplots(squeeze=False, **grid).ravel().tolist()
    for panel in panels:
        panel.set_facecolor(theme["back"])
        panel.grid(visible=True, color=theme["grid"], linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(which="both", colors=theme["ink"], labelsize=9)
        panel.xaxis.label.set_color(theme["ink"])
        panel.yaxis.label.set_color(theme["ink"])
        panel.xaxis.label.set_size(10)
        panel.yaxis.label.set_size(10)
        for side, spine in panel.spines.items():
            spine.set_color(theme["faint"])
            spine.set_visible(side in ("left", "bottom"))
    return figure, panels


def legend(panel: Any, theme: Theme, **options: Any) -> None:
    """What a picture means, right of it, where it hides nothing; points with bars come first."""
    handles, labels = panel.get_legend_handles_labels()
    order = sorted(range(len(handles)), key=lambda number: not hasattr(handles[number], "has_yerr"))
    panel.legend(
        [handles[number] for number in order],
        [labels[number] for number in order],
        frameon=False,
        fontsize=9,
        labelcolor=theme["ink"],
        **({"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0} | options),
    )


def log_seconds(panel: Any, *, axis: str = "y") -> None:
    """A logarithmic axis of seconds, with ticks that read `50 ms` and `2 s`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    chosen = panel.yaxis if axis == "y" else panel.xaxis
    (panel.set_yscale if axis == "y" else panel.set_xscale)("log")
    low, high = sorted(panel.get_ylim() if axis == "y" else panel.get_xlim())
    chosen.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 3000 else (1.0,)))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    chosen.set_minor_formatter(NullFormatter())


def duration(seconds: float) -> str:
    """Three digits, in the unit that fits."""
    if seconds != seconds:
        return "–"
    if seconds == float("inf"):
        return "∞"
    if seconds < 0.001:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def svg(chart: Chart) -> str:
    """The drawing as part of a page: its text is text, its colours are the page's."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        file = io.StringIO()
        chart.draw(PAGE).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    drawing = file.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", drawing, count=1)
    drawing = re.sub(r"(font: [^;\"]*?px )[^;\"]*", rf"\1{FONTS}", drawing)
    drawing = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", drawing)
    # Ids hold for the whole page, in which there are other drawings.
    drawing = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{chart.name}-", drawing)
    return with_variables(drawing)


def write_png(charts: Sequence[Chart], folder: Path) -> list[Path]:
    with _telling_flag("--png"):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{chart.name}.png" for chart in charts]
        for chart, path in zip(charts, paths, strict=True):
            chart.draw(PRINTED).savefig(path, dpi=PNG_DPI)
    return paths


def write_csv(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Seconds and shares, unrounded; what is infinite reads `inf`, what is not known `nan` or nothing."""
    with _telling_flag("--csv"):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{chart.name}.csv" for chart in charts]
        for chart, path in zip(charts, paths, strict=True):
            _write_rows(chart, path)
    return paths


def _write_rows(chart: Chart, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(chart.header)
        writer.writerows(chart.rows)


@contextmanager
def _telling_flag(flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or 'there'}: {error.strerror}", flag) from error
