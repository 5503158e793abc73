"""The report of a load test: what it says, that it needs nothing else, and that its figures are right."""

from __future__ import annotations

import csv
import html.parser
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from compose.cli import app
from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.knee.result import ShapeKnee, SloRow, write_result
from loadtest.report.bench_html import run_sentence
from loadtest.report.bench_result import read_bench_file
from loadtest.report.chart import duration
from loadtest.report.html import knee_page, write_html
from loadtest.report.interval import block_numbers, mean_estimate, percentile_estimates
from loadtest.report.latency_shares import LatencySample, share_chart
from loadtest.report.rate_curves import rate_points
from loadtest.report.theme import DARK, LIGHT, PAGE
from loadtest.report.timeline import timeline_chart
from loadtest.report.words import headline, is_broken, share_text, verdict
from loadtest.report.worst_requests import check_trace_url, worst_requests
from loadtest.validity import ValidityCheck
from shared.errors import ConfigError
from tests.knee_results import SLO, knee_result, simulated_probe, tier_result, unloaded_probe

BATCH = SloRow(name="batch", attainment=0.9, e2el_ms=20_000.0)


@pytest.fixture(scope="module")
def page() -> str:
    probes = [
        unloaded_probe(),
        simulated_probe(9.0, begin_s=20.0, seed=1),
        simulated_probe(14.0, begin_s=60.0, seed=2, failed_share=0.03),
        simulated_probe(11.0, begin_s=100.0, seed=3, cv=2.0, reports=False),
    ]
    tiers = [tier_result(), tier_result(12.0, (11.0, 13.0), slo=BATCH, arrival_cv=2.0, status="unresolved")]
    return knee_page(knee_result(tiers, probes), "http://jaeger:16686/trace/{trace_id}")


class Links(html.parser.HTMLParser):
    """All that a browser would go and get, and all that one may follow."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.followed: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "srcset", "data", "poster") or (name == "href" and tag == "link"):
                self.fetched.append(value or "")
            elif name.endswith("href") and tag == "a":
                self.followed.append(value or "")
            elif name == "id":
                self.ids.append(value or "")


def test_the_page_needs_no_network(page: str) -> None:
    links = Links(page)
    assert links.fetched == []
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert all(link.startswith("http://jaeger:16686/trace/") for link in links.followed)


def test_ids_of_the_drawings_do_not_collide_and_references_hit(page: str) -> None:
    ids = set(Links(page).ids)
    referred = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'xlink:href="#([^"]+)"', page))
    assert referred
    assert referred <= ids
    names = {name for name in ids if "-" in name}
    assert len([name for name in Links(page).ids if name.endswith("-figure_1")]) == len(
        {name for name in names if name.endswith("-figure_1")}
    )


def test_drawings_take_their_colours_from_the_page(page: str) -> None:
    assert set(LIGHT) == set(DARK)
    for name in ("ink", "grid", "series1", "alarm"):
        assert f"var(--{name})" in page
    assert not any(colour in page for colour in PAGE.colours.values()), "a stand-in was left"
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "#000000" not in drawings, "black on a dark page cannot be read"


def test_every_drawing_is_well_formed(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) > 10
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def contrast(one: str, other: str) -> float:
    """As in WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_text_stand_out_from_both_backgrounds(colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        if name.startswith(("series", "rate", "alarm")):
            assert contrast(colour, colours["back"]) >= 3, name
        if name in ("ink", "faint"):
            assert contrast(colour, colours["back"]) >= 4.5, name


@pytest.mark.parametrize(
    "wanted",
    [
        "holds up to 15 requests/s under Poisson arrivals, with a 90 % interval of 14.2 to 15.7",
        "What breaks first is the time to the first token",
        "not confirmed by probes kept out of the fit",
        "is not settled; the estimate is 12 requests/s under arrivals with a CV of 2",
        "Time to first token and rate (arrivals with CV 2)",
        "limit: 500 ms",
        "time to first token, from due",
        "offered rate (requests/s)",
        "The worst requests",
        "http_status: 503",
        "requests that a limit refused",
        "not measured",
        "0123456789abcdef",
        "headrace knee --url http://127.0.0.1:8080",
        "32.0 GiB",
        "random input len",
    ],
)
def test_the_page_tells(page: str, wanted: str) -> None:
    assert wanted in page


def test_what_the_user_named_cannot_become_html() -> None:
    evil = "<script>alert(1)</script>"
    slo = replace_slo(SLO, name=evil)
    check = ValidityCheck(check=evil, passed=False, value=1.0, limit=0.5, reason=evil)
    probe = simulated_probe(9.0)
    probe.requests[-1].failed, probe.requests[-1].error, probe.requests[-1].trace_id = True, evil, evil
    made = knee_page(
        knee_result(
            [tier_result(slo=slo)], [probe], model=evil, validity=[check], command=evil, workload={evil: evil}
        ),
        'http://x/"><b>{trace_id}',
    )
    assert "<script" not in made
    assert "<b>" not in made


def replace_slo(slo: SloRow, **fields: Any) -> SloRow:
    return msgspec.structs.replace(slo, **fields)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"status": "invalid", "reasons": ["the prefix cache drifted"]}, "INVALID"),
        ({"status": "client_bound", "tiers": []}, "The load generator itself was the limit"),
        ({"tiers": [], "shape_knee": ShapeKnee(rate=13.0, definition="Kneedle on log p95")}, "no capacity"),
    ],
)
def test_the_verdict_says_what_the_numbers_are_worth(fields: dict[str, Any], wanted: str) -> None:
    lines = verdict(knee_result(**fields))
    assert any(wanted in line for line in lines)


def test_a_promise_that_no_load_keeps_is_called_so() -> None:
    tier = tier_result(slo_capacity=None, status="infeasible", reasons=["TTFT is 900 ms alone"])
    assert "cannot be kept at any load" in verdict(knee_result([tier]))[0]
    assert "TTFT is 900 ms alone." in verdict(knee_result([tier]))[0]


def test_one_promise_that_cannot_be_kept_does_not_speak_for_the_others() -> None:
    strict = tier_result(slo=replace_slo(SLO, name="strict"), slo_capacity=None, status="infeasible")
    both = knee_result([strict, tier_result()])
    assert headline(both) == "The latency knee of chat: strict cannot be kept; interactive settled"
    assert not is_broken(both)
    assert is_broken(knee_result([strict]))


def test_failures_reach_into_the_percentiles() -> None:
    point = rate_points([simulated_probe(9.0, failed_share=0.04, seed=5)])[0]
    p50, p95, p99 = percentile_estimates(point.requests.ttft_s, point.block, (50.0, 95.0, 99.0))
    assert 0.02 < point.failed_share < 0.06
    assert math.isfinite(p50.value)
    assert p99.value == p99.high == math.inf
    assert p50.low <= p50.value <= p50.high
    assert math.isfinite(p95.value) == (point.failed_share < 0.05)


def test_intervals_are_wider_where_neighbours_are_alike() -> None:
    rng = np.random.default_rng(4)
    block = block_numbers(np.linspace(0, 100, 2000, endpoint=False), 0.0, 100.0)
    independent = rng.lognormal(0.0, 0.5, 2000)
    alike = independent * rng.lognormal(0.0, 0.5, 10)[block.astype(int)]
    (narrow,), (wide,) = (percentile_estimates(values, block, (50.0,)) for values in (independent, alike))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    mean = mean_estimate(independent, block)
    assert mean.low < mean.value < mean.high


def test_the_interval_of_a_mean_covers_it_in_most_repetitions() -> None:
    rng = np.random.default_rng(7)
    block = block_numbers(np.linspace(0, 100, 500, endpoint=False), 0.0, 100.0)
    covered = 0
    for seed in range(60):
        estimate = mean_estimate(rng.normal(1.0, 1.0, 500), block, seed)
        covered += estimate.low <= 1.0 <= estimate.high
    assert covered >= 54  # 90 % of 60, and half as many blocks make it wider than that


def test_lines_of_shares_end_below_one_by_the_share_that_failed() -> None:
    latencies = np.array([0.1, 0.2, math.inf, 0.3, math.nan])
    chart = share_chart("ttft", [LatencySample("9/s", latencies, 0.25)], {})
    assert chart is not None
    assert [row[2:] for row in chart.rows] == [[0.1, 0.0], [0.1, 0.25], [0.2, 0.5], [0.3, 0.75]]


def test_the_timeline_adds_up_to_what_was_asked_and_answered() -> None:
    probes = [simulated_probe(9.0, begin_s=20.0, seed=1), simulated_probe(12.0, begin_s=90.0, seed=2)]
    chart = timeline_chart(probes)
    assert chart is not None
    client = [row for row in chart.rows if row[0] == "client"]
    requests = [one for probe in probes for one in probe.requests]
    tokens = sum(one.num_output_tokens or 0 for one in requests)
    in_flight_s = sum((one.end_s or 0) - (one.sent_s or 0) for one in requests)
    assert sum(row[3] for row in client) == pytest.approx(tokens, rel=1e-6)
    assert sum(row[2] for row in client) == pytest.approx(in_flight_s, rel=1e-6)
    server = [row for row in chart.rows if row[0] == "server"]
    assert len(server) == sum(len(probe.samples) for probe in probes)


def test_an_answer_that_was_cut_off_counts_for_what_had_come_of_it() -> None:
    whole = [
        ProbedRequest(due_s=n, sent_s=n, first_token_s=n + 0.1, end_s=n + 1.1, num_output_tokens=11)
        for n in (0.0, 1.0, 2.0)
    ]
    cut = ProbedRequest(
        due_s=3.0, sent_s=3.0, first_token_s=3.1, end_s=3.6, num_output_tokens=1000, cut_off=True
    )
    probe = Probe(kind="saturation", begin_s=0.0, end_s=3.6, drained_s=3.6, requests=[*whole, cut])
    chart = timeline_chart([probe])
    assert chart is not None
    assert sum(row[3] for row in chart.rows if row[0] == "client") == pytest.approx(33 + 6)


def test_the_worst_are_those_furthest_beyond_a_limit() -> None:
    def request(due_s: float, ttft: float, per_token: float) -> ProbedRequest:
        end = due_s + ttft + per_token * 99
        return ProbedRequest(
            due_s=due_s, sent_s=due_s, first_token_s=due_s + ttft, end_s=end, num_output_tokens=100
        )

    requests = [request(float(n), 0.1, 0.01) for n in range(20)]
    requests[3] = request(3.0, 1.0, 0.01)  # twice the limit
    requests[7] = request(7.0, 0.1, 0.15)  # three times the other limit
    requests[9] = ProbedRequest(due_s=9.0, sent_s=9.0, failed=True)
    probe = Probe(
        kind="open_loop", rate=1.0, cv=1.0, begin_s=0.0, end_s=20.0, drained_s=40.0, requests=requests
    )
    assert [one.due_s for _, one in worst_requests([probe], [SLO])][:2] == [7.0, 3.0]
    assert len(worst_requests([probe], [SLO])) == 10
    assert 9.0 not in [one.due_s for _, one in worst_requests([probe], [SLO])]


@pytest.mark.parametrize(
    "template",
    ["http://x/", "http://x/{id}", "http://x/{trace_id}/{other}", "http://x/{", "javascript:{trace_id}"],
)
def test_a_link_without_a_place_for_the_id_is_refused(template: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_trace_url(template)
    assert error.value.param == "--trace-url"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000123, "12.3 µs"), (0.05, "50 ms"), (2.0, "2 s"), (math.inf, "∞"), (math.nan, "–")],
)
def test_times_are_written_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_search_with_nothing_in_it_still_makes_a_page(tmp_path: Path) -> None:
    bare = knee_result(
        [], saturation_rate=None, saturation_ci90=None, validity=[], phases=[], status="client_bound"
    )
    write_html(bare, tmp_path / "bare.html")
    assert "load generator was the limit" in (tmp_path / "bare.html").read_text()


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        write_html(knee_result([]), tmp_path / "nowhere" / "x.html")
    assert error.value.param == "--html"


def test_pictures_and_tables_of_the_command_hold_what_is_shown(tmp_path: Path) -> None:
    small = knee_result([tier_result()], [simulated_probe(9.0, duration_s=15.0, failed_share=0.05)])
    write_result(small, tmp_path / "knee.json")
    folders = [str(tmp_path / "png"), str(tmp_path / "csv")]
    app(
        ["report", str(tmp_path / "knee.json"), "--png", folders[0], "--csv", folders[1]],
        standalone_mode=False,
    )
    pictures = {path.stem for path in (tmp_path / "png").iterdir()}
    tables = {path.stem for path in (tmp_path / "csv").iterdir()}
    assert pictures == tables
    assert {
        "ttft-rate",
        "tpot-rate",
        "attainment-rate",
        "ttft-shares",
        "timeline",
        "phases",
        "lengths",
    } <= tables
    for path in (tmp_path / "png").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
    with (tmp_path / "csv" / "ttft-rate.csv").open() as file:
        (row,) = csv.DictReader(file)
    point = rate_points(small.probes)[0]
    assert float(row["failed_share"]) == pytest.approx(point.failed_share)
    ordered = sorted(point.requests.ttft_s)
    assert ordered[int(0.5 * len(ordered)) - 1] <= float(row["p50_s"]) <= ordered[int(0.5 * len(ordered)) + 1]


def bench_values(rate: float | str, *, detailed: bool, concurrency: int | None = None) -> dict[str, Any]:
    """As vLLM's `bench serve` writes them."""
    values: dict[str, Any] = {
        "model_id": "small", "request_rate": rate, "burstiness": 1.0, "max_concurrency": concurrency,
        "num_prompts": 4, "completed": 3, "failed": 1, "request_throughput": 1.5, "output_throughput": 45.0,
        "median_ttft_ms": 100.0, "p95_ttft_ms": 190.0, "p99_ttft_ms": 198.0,
    }  # fmt: skip
    if detailed:
        values |= {
            "start_times": [50.0, 50.5, 51.0, 51.5], "ttfts": [0.1, 0.2, 0.0, 0.1],
            "latencies": [1.1, 1.2, 0.0, 2.1], "errors": ["", "", "it broke", ""],
            "input_lens": [10, 10, 10, 10], "output_lens": [11, 11, 0, 21],
        }  # fmt: skip
    return values


def written(folder: Path, name: str, *objects: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(one) for one in objects))
    return path


def test_a_file_of_vllms_own_benchmark_is_read_with_failures_as_infinite(tmp_path: Path) -> None:
    (run,) = read_bench_file(written(tmp_path, "x.json", bench_values(2.0, detailed=True)))
    assert run.probe is not None
    assert [one.ttft_due for one in run.probe.measured] == pytest.approx([0.1, 0.2, math.inf, 0.1])
    assert run.probe.requests[0].tpot == pytest.approx(0.1)
    assert run.probe.requests[2].error == "it broke"
    assert (run.label, run.failed_share, run.counts_from_due) == ("2/s", 0.25, False)


def test_a_sweep_of_bench_files_is_one_page_by_load(tmp_path: Path) -> None:
    several = written(
        tmp_path,
        "sweep.json",
        bench_values("inf", detailed=False, concurrency=8),
        bench_values("inf", detailed=False, concurrency=2),
    )
    alone = written(tmp_path, "one.json", bench_values("inf", detailed=True, concurrency=4))
    app(["report", str(several), str(alone), "--html", str(tmp_path / "x.html")], standalone_mode=False)
    page = (tmp_path / "x.html").read_text()
    places = [page.index(f"{number} at once") for number in (2, 4, 8)]
    assert places == sorted(places)
    assert "requests at once" in page
    assert "25 %" in page, "the share of failures"
    assert "Not every file holds the times of each request" in page
    assert Links(page).fetched == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("{", "is no JSON"),
        ("[]", "neither the result of `headrace knee` nor of `bench serve`"),
        ('{"request_rate": 1}', "has no 'completed'"),
        ('{"request_rate": "often", "completed": 1, "request_throughput": 1}', "is not a whole result"),
        ('{"headrace": {"kind": "knee", "format_version": 99}}', "format_version"),
    ],
)
def test_a_file_that_is_no_result_is_told_apart(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        app(["report", str(tmp_path / "x.json")], standalone_mode=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("completed", "3"),
        ("failed", "no"),
        ("completed", -1),
        ("completed", 1.5),
        ("request_rate", -1.0),
        ("burstiness", -1.0),
    ],
)
def test_counts_that_are_none_are_told(tmp_path: Path, key: str, value: Any) -> None:
    file = written(tmp_path, "x.json", bench_values(2.0, detailed=True) | {key: value})
    with pytest.raises(ConfigError, match=f"not a whole result of `bench serve`.*{key}"):
        read_bench_file(file)


def test_the_page_does_not_replace_the_measurement(tmp_path: Path) -> None:
    file = written(tmp_path, "x.json", bench_values(2.0, detailed=True))
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="is the measurement itself") as error:
        app(["report", str(file), "--html", str(tmp_path / "." / "x.json")], standalone_mode=False)
    assert error.value.param == "--html"
    assert file.read_bytes() == before


def test_a_replay_is_called_one(tmp_path: Path) -> None:
    workload = {"self_timed": True, "dataset_path": "day.jsonl", "trace_time_scale": 0.5}
    values = bench_values("inf", detailed=True)
    values["headrace"] = {"workload": workload, "delivered_request_rate": 10.01}
    (run,) = read_bench_file(written(tmp_path, "x.json", values))
    assert run_sentence(run).startswith(
        "replay of day.jsonl, its times scaled by 0.5, 10.01/s sent: 3 requests"
    )


@pytest.mark.parametrize(
    ("share", "words"),
    [(1.0, "100 %"), (0.996, "99.6 %"), (0.25, "25 %"), (0.0123, "1.2 %"), (0.0, "0 %"), (0.0999, "10 %")],
)
def test_shares_are_written_without_powers_of_ten(share: float, words: str) -> None:
    assert share_text(share) == words


def test_searches_are_shown_one_at_a_time(tmp_path: Path) -> None:
    write_result(knee_result([]), tmp_path / "knee.json")
    bench = written(tmp_path, "x.json", bench_values(2.0, detailed=True))
    with pytest.raises(ConfigError, match="one at a time"):
        app(["report", str(bench), str(tmp_path / "knee.json")], standalone_mode=False)


def test_a_capacity_far_from_every_probe_is_called_an_extrapolation() -> None:
    near = knee_result([tier_result(15.0)], [simulated_probe(14.0)])
    far = knee_result([tier_result(15.0)], [simulated_probe(9.0)])
    assert "extrapolation" not in " ".join(verdict(near))
    assert "no probe was made near it: they were at 9 to 9 requests/s" in " ".join(verdict(far))
