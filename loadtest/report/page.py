"""Pieces of a page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from loadtest.report.chart import Chart, svg
from loadtest.report.theme import style_variables
from shared.errors import ConfigError

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.verdict { border-left: .3rem solid var(--series1); padding: .3rem 1rem; margin: 1rem 0; font-size: 1.05rem;
  background: color-mix(in srgb, var(--band) 12%, transparent); }
.verdict.broken { border-color: var(--alarm); }
.verdict p { margin: .5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.broken { color: var(--alarm); font-weight: 600; }
a { color: var(--series1); }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } figure { margin: 1rem 0; }
figcaption, .note { color: var(--faint); font-size: .88rem; }
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """Of a table. What is no text is HTML already."""

    html: str
    is_number: bool = False
    is_broken: bool = False


def text(value: object, *, broken: bool = False) -> Cell:
    return Cell(escape("–" if value is None else str(value)), is_broken=broken)


def number(written: str, *, broken: bool = False) -> Cell:
    return Cell(escape(written), is_number=True, is_broken=broken)


def code(value: str) -> Cell:
    return Cell(f"<code>{escape(value)}</code>")


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A column stands right where its first cell is a number."""
    rows = list(rows)
    kinds = [cell.is_number for cell in rows[0]] if rows else [False] * len(head)
    names = "".join(
        f"<th{_class(is_number=is_number)}>{escape(name)}</th>"
        for name, is_number in zip(head, kinds, strict=True)
    )
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(is_number=cell.is_number, is_broken=cell.is_broken)}>{cell.html}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def facts(values: Iterable[tuple[str, Cell]]) -> str:
    """A table of two columns: what, and its value."""
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{cell.html}</td></tr>" for name, cell in values)
    return f'<div class="wide"><table><tbody>{lines}</tbody></table></div>'


def figure(chart: Chart) -> list[str]:
    return [
        f'<h2 id="{escape(chart.name)}">{escape(chart.title)}</h2>',
        f'<figure role="img" aria-label="{escape(chart.title)}">{svg(chart)}'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>",
    ]


def verdict_box(lines: Iterable[str], *, broken: bool) -> str:
    inside = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<div class="verdict{" broken" if broken else ""}">{inside}</div>'


def heading(title: str) -> str:
    return f"<h2>{escape(title)}</h2>"


def note(line: str) -> str:
    return f'<p class="note">{escape(line)}</p>'


def whole_page(title: str, sections: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_variables()}{_STYLE}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{chr(10).join(sections)}\n</body></html>\n"
    )


def write_page(page: str, path: Path, flag: str) -> None:
    """Raises ConfigError that names the flag if the file cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", flag) from error


def _class(*, is_number: bool = False, is_broken: bool = False) -> str:
    names = " ".join(name for name, holds in (("number", is_number), ("broken", is_broken)) if holds)
    return f' class="{names}"' if names else ""
