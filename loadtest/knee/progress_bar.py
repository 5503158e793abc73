"""How far a search is, on a terminal: the phase, the time, and each tier's estimate so far."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from loadtest.knee.prober import Prober
from loadtest.knee.procedure import Cell, Progress, SearchSettings

REFRESH_S = 1.0  # each takes a millisecond or two of the generator's event loop
BAR_WIDTH = 30


@contextlib.contextmanager
def progress_bar(settings: SearchSettings, prober: Prober) -> Iterator[Callable[[Progress], None] | None]:
    """Gives what the search tells its progress to; None where there is no terminal. Inside a running loop."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    # Without a thread of its own, which would take the generator's processor time when it likes.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        loop = asyncio.get_running_loop()
        handle: asyncio.TimerHandle | None = None
        latest: Progress | None = None

        def show() -> None:
            nonlocal handle
            if latest is not None:
                live.update(rendered(latest, prober.now_s()), refresh=True)
            handle = loop.call_later(REFRESH_S, show)

        def on_progress(progress: Progress) -> None:
            nonlocal latest
            latest = progress

        show()
        try:
            yield on_progress
        finally:
            if handle is not None:
                handle.cancel()


def rendered(progress: Progress, spent_s: float) -> RenderableType:
    """One line for the search, and one for each tier that has an estimate."""
    left_s = max(0.0, progress.budget_s - spent_s)
    bar = ProgressBar(total=progress.budget_s, completed=min(spent_s, progress.budget_s), width=BAR_WIDTH)
    first = Columns([Text(f"{progress.phase:<16}"), bar, Text(f"{left_s:.0f} s left")])
    return Group(first, *(Text(line) for line in _estimates(progress.cells)))


def _estimates(cells: Sequence[Cell]) -> list[str]:
    several_laws = len({cell.cv for cell in cells}) > 1
    lines = []
    for cell in cells:
        if cell.estimate is None:
            continue
        name = f"{cell.tier.name}, CV {cell.cv:g}" if several_laws else cell.tier.name
        low, high = cell.estimate.low, cell.estimate.high
        lines.append(f"  {name}: {cell.estimate.rate:.3g} requests/s, 90 % interval {low:.3g} to {high:.3g}")
    return lines
