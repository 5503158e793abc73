"""A report as one page of HTML, which needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from compose.experiment.charts import comparison_chart, time_chart
from compose.experiment.metric import METRICS
from compose.experiment.report import Report
from compose.experiment.text import (
    OUTCOMES,
    SHOWN_TIMES,
    comparison_cells,
    feedback_cell,
    finish_reasons,
    headline,
    moment,
    notes,
    time_cells,
    variant_name,
)
from compose.experiment.verdict import verdict

MAX_COMMENTS = 50
_STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1f24; --faint: #667; --line: #ccd; --back: #fff; --panel: #f4f5f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --faint: #99a; --line: #445; --back: #16181c; --panel: #22252b; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { background: var(--panel); border-left: .3rem solid #2b6cb0; padding: .6rem 1rem;
  font-size: 1.1rem; }
.verdict.broken { border-color: #c0392b; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } svg .none { stroke: var(--faint); stroke-dasharray: 4 3; }
.note, figcaption { color: var(--faint); font-size: .85rem; } figure { margin: 1rem 0; }
"""


def report_page(report: Report) -> str:
    title = escape(f"{report.route}, version {report.version}")
    broken = " broken" if report.split.is_broken else ""
    sections = [
        f"<h1>{escape(headline(report))}</h1>",
        f'<div class="verdict{broken}">{"".join(f"<p>{escape(line)}</p>" for line in verdict(report))}</div>',
        f"<h2>Differences from {escape(report.control)}</h2>",
        *_comparison_charts(report),
        _table(
            ["variant", "metric", "difference", "interval", "p", "would show by now"],
            (comparison_cells(one) for one in report.comparisons),
        ),
        "<h2>Times</h2>",
        *(
            _figure(
                time_chart(report, metric),
                f"{METRICS[metric].title}: the share of the requests that took no longer",
            )
            for metric in SHOWN_TIMES
            if any(metric in one.times for one in report.variants)
        ),
        _table(
            ["variant", "time", "values", "geometric mean", "p50", "p95", "p99"],
            (
                [variant_name(one), title, f"{one.times[metric].num_values:,}", *time_cells(one, metric)]
                for metric, title in SHOWN_TIMES.items()
                for one in report.variants
                if metric in one.times
            ),
        ),
        "<h2>Requests</h2>",
        _table(
            ["variant", "subjects", "requests", *OUTCOMES, "answered", "input tokens", "output tokens",
             "finish reasons", "feedback"],
            (
                [
                    variant_name(one),
                    f"{one.num_subjects:,}",
                    f"{one.assigned.requests:,}",
                    *(f"{one.assigned.outcomes.get(each, 0):,}" for each in OUTCOMES),
                    f"{one.served.requests:,}",
                    f"{one.assigned.input_tokens:,}",
                    f"{one.assigned.output_tokens:,}",
                    finish_reasons(one),
                    feedback_cell(one),
                ]
                for one in report.variants
            ),
        ),
        *_comments(report),
        *(f'<p class="note">{escape(note)}</p>' for note in notes(report)),
        f'<p class="note">Made on {escape(moment(report.made_at))}.</p>',
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Experiment {title}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(sections)}\n</body></html>\n"
    )


def _comparison_charts(report: Report) -> Iterable[str]:
    """Ratios and scores have axes of their own: a percent of time is no percentage point."""
    for caption, names in (
        (
            "Times, in percent of the control's; bars are intervals that hold at all looks.",
            ("ttft", "tpot", "e2e"),
        ),
        ("Percentage points of the requests.", ("failed", "aborted")),
        ("Points of the score, which goes from −1 to 1.", ("feedback",)),
    ):
        shown = [one for one in report.comparisons if one.metric in names and one.estimate is not None]
        if shown:
            yield _figure(comparison_chart(shown), caption)


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _comments(report: Report) -> Iterable[str]:
    if not report.comments:
        return
    yield "<h2>Comments</h2>"
    yield _table(
        ["variant", "score", "comment"],
        ([one.variant, f"{one.score:+.2f}", one.comment] for one in report.comments[:MAX_COMMENTS]),
    )
    if len(report.comments) > MAX_COMMENTS:
        yield f'<p class="note">And {len(report.comments) - MAX_COMMENTS} more: see --json.</p>'
