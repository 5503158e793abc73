"""The command line of `headrace compare`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadtest.compare import Comparison


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Of `headrace knee --json`, or of `bench serve`.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Of the same kind; it is set against A.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compare even what did not measure the same thing.")
    ] = False,
) -> None:
    """How two builds or variants differ, and how sure that is. The exit code does not tell who is better."""
    # Local: numpy would slow down every `headrace --help`.
    import msgspec

    from loadtest.compare import compare_runs, compare_searches
    from loadtest.report.result_files import read_results
    from shared.errors import ConfigError

    first, second = read_results([a]), read_results([b])
    if isinstance(first, list) and isinstance(second, list):
        made = compare_runs(first, second, force=force)
    elif not isinstance(first, list) and not isinstance(second, list):
        made = compare_searches(first, second, force=force)
    else:
        raise ConfigError(
            f"{a} and {b} are not of one kind: one is a search, the other a run of `bench serve`"
        )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_document(made))))
    else:
        _print(made)


def _document(made: Comparison) -> dict[str, object]:
    return {
        "verdict": list(made.verdict),
        "forced": list(made.forced),
        "differences": [
            {
                "figure": one.figure,
                "unit": one.unit,
                "a": json_number(one.a),
                "b": json_number(one.b),
                "difference": json_number(one.difference),
                "ratio": json_number(one.ratio),
                "ratio_ci90": None
                if one.ratio_ci90 is None
                else [json_number(end) for end in one.ratio_ci90],
                "verdict": one.verdict,
                "design_effect": one.design_effect,
                "remark": one.remark,
            }
            for one in made.differences
        ],
    }


def json_number(value: float) -> float | str | None:
    """As in result files: infinity is a string, what is not known null."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return None if math.isnan(value) else value


def _print(made: Comparison) -> None:
    from loadtest.report.chart import duration  # local: see above

    for reason in made.forced:
        typer.echo(f"WARNING: {reason}")
    for line in made.verdict:
        typer.echo(line)
    typer.echo("")

    def shown(value: float, unit: str) -> str:
        return duration(value) if unit == "s" else f"{value:.4g} {unit}".rstrip()

    rows = [("", "A", "B", "difference", "ratio", "90 % interval", "design effect")]
    for one in made.differences:
        ends = "–" if one.ratio_ci90 is None else f"{one.ratio_ci90[0]:.3f} – {one.ratio_ci90[1]:.3f}"
        # Below a nanosecond is what floating point leaves of nothing.
        difference = 0.0 if abs(one.difference) < 1e-9 else one.difference
        sign = "−" if difference < 0 else "+"
        rows.append(
            (
                one.figure,
                shown(one.a, one.unit),
                shown(one.b, one.unit),
                sign + shown(abs(difference), one.unit),
                "–" if math.isnan(one.ratio) else f"{one.ratio:.3f}",
                ends,
                "" if one.design_effect is None else f"{one.design_effect:.1f}",
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
