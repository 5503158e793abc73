"""Tables that lose nothing: as wide as they need to be, or as wide as the terminal is."""

from __future__ import annotations

import sys

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

ENDLESS = 1_000_000  # columns, of what is no terminal


def output_console() -> Console:
    """stdout. What goes into a file or to another program is not folded: a row is a line, however long."""
    return Console() if sys.stdout.isatty() else Console(width=ENDLESS)


class FittedTable:
    """A table without a box, in whatever room there is. Columns that must stay in one piece are `no_wrap`.

    Where not even its words fit beside each other, each row becomes a card, a line for each of its cells.
    rich by itself would cut words off, and half of a key's id is of no use.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(console, options)
        if widths is not None:
            for column, width in zip(self._table.columns, widths, strict=True):
                column.width, column.overflow = width, "fold"
            yield self._table
            return
        if self._table.title:
            yield self._table.title
        rows = zip(*(column.cells for column in self._table.columns), strict=True)
        for number, cells in enumerate(rows):
            if number:
                yield ""
            yield self._card(cells)

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int] | None:
        """Of the columns: the widest give way first. None: there is no room for all of their words."""
        endless, columns = options.update(max_width=ENDLESS), self._table.columns
        least, widths = [], []
        for column in columns:
            cells = [Measurement.get(console, endless, cell) for cell in (column.header, *column.cells)]
            widths.append(max(cell.maximum for cell in cells))
            least.append(widths[-1] if column.no_wrap else max(cell.minimum for cell in cells))
        between = console.measure(self._table, options=endless).maximum - sum(widths)
        room = options.max_width - between
        if self._table.row_count and sum(least) > room:
            return None
        while sum(widths) > room:
            can_give = [index for index, width in enumerate(widths) if width > least[index]]
            if not can_give:
                break  # nothing but headings
            widths[max(can_give, key=widths.__getitem__)] -= 1
        return widths

    def _card(self, cells: tuple[object, ...]) -> Table:
        card = Table.grid(padding=(0, 2))
        card.add_column(no_wrap=True)
        card.add_column(overflow="fold")
        for column, cell in zip(self._table.columns, cells, strict=True):
            if cell not in ("", None):
                heading = str(column.header).replace("\n", " ")
                card.add_row(heading, cell)  # type: ignore[arg-type]
        return card
