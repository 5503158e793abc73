"""What a report says: in words, in a terminal and on a page."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from rich.console import Console

from compose.experiment.figures import ExperimentFigures, ExperimentName, Feedback
from compose.experiment.html import report_page
from compose.experiment.metric import METRICS
from compose.experiment.report import Report, make_report
from compose.experiment.text import report_text, seconds
from compose.experiment.verdict import verdict
from shared.config import RouteConfig, VariantConfig
from shared.errors import ConfigError
from shared.experiment_figures import (
    NUM_CLUSTERS,
    NUM_GROUPS,
    ClusterSums,
    CommentRecord,
    ExperimentRecord,
    RequestCounts,
    VariantFigures,
    bin_of,
)


def figures(
    *,
    ratios: dict[str, float],
    num_subjects: int = 2000,
    failing: dict[str, float] | None = None,
    lost: int = 0,
    seed: int = 1,
) -> ExperimentFigures:
    """Of variants whose subjects asked once each. `ratios`: of their times to the first one's; `failing`: the
    share of requests that fail; `lost`: subjects of the last variant that do not arrive."""
    rng = np.random.default_rng(seed)
    record = ExperimentRecord(1.75e9, 1.7501e9)
    feedback = Feedback(comments=[CommentRecord("a", -1.0, "<script>alert('x')</script>")])
    share = 1 / len(ratios)
    shares = dict.fromkeys(ratios, share)
    for name, ratio in ratios.items():
        count = round(num_subjects * share)
        cluster = rng.integers(NUM_CLUSTERS, size=count)
        values = rng.normal(-1.0 + math.log(ratio), 0.7, count)
        fails = rng.random(count) < (failing or {}).get(name, 0.0)
        its = VariantFigures(assigned=RequestCounts(count, outcomes={"ok": count}))
        its.clusters = {
            "ttft": by_cluster(cluster, values),
            "failed": by_cluster(cluster, fails.astype(float)),
        }
        for value, number in zip(values, cluster % NUM_GROUPS, strict=True):
            histogram = its.histogram_groups("ttft")[number]
            histogram[bin_of(math.exp(value))] = histogram.get(bin_of(math.exp(value)), 0) + 1
        record.variants[name] = its
        arrived = count - (lost if name == list(ratios)[-1] else 0)
        for _ in range(arrived):
            record.split.count(name, shares)
        feedback.sums[name] = by_cluster(cluster, rng.choice([-1.0, 1.0], count))
    split = [VariantConfig(variant=name, model="m") for name in ratios]
    route = RouteConfig(name="chat", version=2, split=split)
    return ExperimentFigures(ExperimentName("chat", 2), record, feedback, num_subjects, route, [1, 3])


def by_cluster(cluster: np.ndarray, values: np.ndarray) -> ClusterSums:
    return ClusterSums(
        np.bincount(cluster, minlength=NUM_CLUSTERS).astype(float).tolist(),
        np.bincount(cluster, values, minlength=NUM_CLUSTERS).tolist(),
    )


def test_a_variant_that_is_slower_is_said_to_be_so_with_its_interval():
    report = make_report(figures(ratios={"a": 1.0, "b": 1.3}))
    [sentence] = verdict(report)
    match = re.fullmatch(
        r"b is ([\d.]+) % slower to the first token than a \(95 % interval \+([\d.]+) % to \+([\d.]+) %\)\.",
        sentence,
    )
    assert match is not None, sentence
    estimate, low, high = map(float, match.groups())
    assert low < 30 < high
    assert low < estimate < high


def test_where_it_cannot_be_told_yet_it_says_what_would_show_and_how_many_subjects_are_missing():
    report = make_report(figures(ratios={"a": 1.0, "b": 1.0}, num_subjects=600))
    [sentence] = verdict(report)
    match = re.search(
        r"one of ([\d.]+) % would show by now\. For one of 10\.0 %, about ([\d,]+) more", sentence
    )
    assert sentence.startswith("Cannot tell yet: no difference of b and a shows in time to first token")
    assert match is not None, sentence
    would_show, missing = float(match[1]), int(match[2].replace(",", ""))
    assert would_show > 10
    enough = make_report(
        figures(ratios={"a": 1.0, "b": 1.0}, num_subjects=600 + round(1.1 * missing), seed=3)
    )
    assert verdict(enough)[0].startswith("No difference of b and a shows")
    assert enough.comparisons[0].detectable == pytest.approx(1.1, abs=0.01)


def test_a_handful_of_subjects_says_nothing():
    report = make_report(figures(ratios={"a": 1.0, "b": 9.0}, num_subjects=30))
    [sentence] = verdict(report)
    assert "too few subjects got a" in sentence
    assert report.comparisons[0].p_value is None
    assert not report.comparisons[0].is_called


def test_nothing_is_said_of_a_difference_while_the_split_is_broken():
    report = make_report(figures(ratios={"a": 1.0, "b": 1.3}, lost=300))
    [sentence] = verdict(report)
    assert sentence.startswith(
        "The split is broken: do not read on. Of the subjects a got 58.8% instead of 50.0%"
    )
    assert 'class="verdict broken"' in report_page(report)


def test_a_metric_beside_the_primary_one_is_told_if_it_differs():
    report = make_report(
        figures(ratios={"a": 1.0, "b": 1.0}, num_subjects=8000, failing={"a": 0.01, "b": 0.06}), metric="ttft"
    )
    first, second = verdict(report)
    assert "shows in time to first token" in first
    assert second.startswith("Besides, b fails ")
    assert "percentage points more often than a (95 % interval +" in second
    failed = make_report(
        figures(ratios={"a": 1.0, "b": 1.0}, failing={"a": 0.01, "b": 0.06}), metric="failed"
    )
    assert failed.comparisons[0].metric == "failed"


def test_of_several_variants_each_p_value_of_the_primary_metric_is_corrected():
    report = make_report(figures(ratios={"a": 1.0, "b": 1.3, "c": 1.0, "d": 1.0}, num_subjects=8000))
    primary = [one for one in report.comparisons if one.metric == "ttft"]
    assert [one.variant for one in primary] == ["b", "c", "d"]
    p_value, adjusted = primary[0].p_value, primary[0].adjusted_p_value
    assert p_value is not None
    assert adjusted == pytest.approx(3 * p_value)
    assert [one.is_called for one in primary] == [True, False, False]


def test_the_control_can_be_chosen_and_what_there_is_not_is_refused():
    given = figures(ratios={"a": 1.0, "b": 1.3})
    assert verdict(make_report(given, control="b"))[0].startswith("a is ")
    assert "faster to the first token than b" in verdict(make_report(given, control="b"))[0]
    with pytest.raises(ConfigError, match="there are: a, b"):
        make_report(given, control="z")
    with pytest.raises(ConfigError, match="there are: ttft, tpot"):
        make_report(given, metric="speed")


def test_a_variant_alone_has_nothing_to_be_compared_with():
    assert verdict(make_report(figures(ratios={"a": 1.0}))) == [
        "There is only one variant: nothing to compare."
    ]


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(
        figures(ratios={"a": 1.0, "b": 1.3, "a-variant-with-a-long-name": 1.0}, num_subjects=6000)
    )


class Reader(HTMLParser):
    """Fails where tags are not closed in order; collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_no_network_and_runs_nothing_of_a_client(report: Report):
    page = report_page(report)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.addresses == []
    assert not re.search(r"https?://|@import|url\(", page)
    assert "script" not in reader.tags
    assert "&lt;script&gt;" in page
    for sentence in verdict(report):
        assert sentence in page
    assert {"svg", "polyline", "circle", "table"} <= reader.tags
    assert "nan" not in page.lower()


def test_numbers_of_pictures_lie_within_them(report: Report):
    for drawing in re.findall(r"<svg.*?</svg>", report_page(report), re.DOTALL):
        width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawing).groups())  # type: ignore[union-attr]
        for x in re.findall(r' (?:x|x1|x2|cx)="([^"]+)"', drawing):
            assert 0 <= float(x) <= width
        for y in re.findall(r' (?:y|y1|y2|cy)="([^"]+)"', drawing):
            assert 0 <= float(y) <= height
        for points in re.findall(r'points="([^"]+)"', drawing):
            for point in points.split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_the_terminal_gets_the_verdict_and_every_comparison(report: Report):
    output = io.StringIO()
    Console(file=output, width=250).print(report_text(report))
    text = output.getvalue()
    for sentence in verdict(report):
        assert sentence in text
    for metric in METRICS.values():
        assert metric.title in text


def test_the_report_is_json(report: Report):
    read = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert read == report


def test_times_are_shown_with_the_unit_that_fits():
    assert [seconds(time_s) for time_s in (0.00123, 0.35, 0.9999, 1.5, 1200.0)] == [
        "1.23 ms",
        "350 ms",
        "1 s",
        "1.5 s",
        "1200 s",
    ]
