"""`headrace compare`: two results of one kind, how they differ, and how sure that is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compose.cli import app
from loadtest.compare import Comparison, Difference, compare_runs, compare_searches, ratio_interval
from loadtest.knee.result import KneeResult, write_result
from loadtest.report.bench_result import BenchRun, read_bench_file
from shared.errors import ConfigError
from tests.knee_results import knee_result, simulated_probe, tier_result, unloaded_probe


def search(rate: float = 15.0, ci90: tuple[float, float] = (14.0, 16.0), **fields: Any) -> KneeResult:
    return knee_result([tier_result(rate, ci90)], **fields)


def named(made: Comparison, figure: str) -> Difference:
    return next(one for one in made.differences if one.figure == figure)


def run_file(folder: Path, name: str, *, slower: float = 1.0, seed: int = 0, **fields: Any) -> Path:
    """Of `bench serve`, with 400 requests at 10 per second."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(0.1, 400))
    ttfts = rng.lognormal(-2.0, 0.3, 400) * slower
    latencies = ttfts + 0.02 * 49 * slower
    values: dict[str, Any] = {
        "model_id": "small", "backend": "openai", "request_rate": 10.0, "burstiness": 1.0,
        "max_concurrency": None,
        "num_prompts": 400, "completed": 400, "failed": 0, "request_throughput": 9.8,
        "output_throughput": 490.0,
        "start_times": starts.tolist(), "ttfts": ttfts.tolist(), "latencies": latencies.tolist(),
        "errors": [""] * 400, "input_lens": [100] * 400, "output_lens": [50] * 400,
    }  # fmt: skip
    path = folder / name
    path.write_text(json.dumps(values | fields))
    return path


def runs(folder: Path, name: str, **fields: Any) -> list[BenchRun]:
    return read_bench_file(run_file(folder, name, **fields))


@pytest.mark.parametrize(
    ("a", "a_ci", "b", "b_ci", "expected"),
    [
        # Distances of 10 % on both sides make 1.1 to the power of the square root of two.
        (10.0, (10 / 1.1, 11.0), 10.0, (10 / 1.1, 11.0), (1.1 ** -(2**0.5), 1.1 ** (2**0.5))),
        (10.0, (10.0, 10.0), 20.0, (18.0, 25.0), (1.8, 2.5)),  # A is known for sure
        (10.0, (8.0, 10.0), 20.0, (20.0, 20.0), (2.0, 2.5)),  # each side by itself
        (10.0, (0.0, 11.0), 10.0, (9.0, 11.0), (0.0, math.inf)),
    ],
)
def test_a_ratio_gets_its_interval_from_both(
    a: float, a_ci: tuple[float, float], b: float, b_ci: tuple[float, float], expected: tuple[float, float]
) -> None:
    assert ratio_interval(a, a_ci, b, b_ci) == pytest.approx(expected)


def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    half = 1.645 * 0.05  # of a normal error of 5 % on the logarithm
    covered = 0
    for _ in range(2000):
        one, other = 10 * np.exp(rng.normal(0, 0.05, 2))
        low, high = ratio_interval(
            one,
            (one * math.exp(-half), one * math.exp(half)),
            other,
            (other * math.exp(-half), other * math.exp(half)),
        )
        covered += low <= 1 <= high
    assert 0.88 <= covered / 2000 <= 0.92


def test_equal_searches_show_no_difference() -> None:
    made = compare_searches(search(), search(15.4, (14.5, 16.3)))
    capacity = named(made, "capacity of interactive")
    assert capacity.verdict == "no difference shown"
    assert made.verdict[0].startswith(
        "No difference shows in the capacity of interactive: 15 and 15.4 requests/s"
    )
    assert made.verdict[0].endswith("which holds 1.")


def test_a_larger_capacity_is_told_with_its_ratio() -> None:
    made = compare_searches(search(), search(20.0, (19.0, 21.0)))
    capacity = named(made, "capacity of interactive")
    assert (capacity.verdict, capacity.difference, capacity.ratio) == ("more", 5.0, pytest.approx(4 / 3))
    assert "33.3 % higher in B" in made.verdict[0]
    assert made.verdict[0].endswith("which does not hold 1.")


def test_a_difference_is_told_by_the_interval_of_the_ratio_alone() -> None:
    made = compare_searches(search(15.0, (14.3, 15.7)), search(13.8, (13.1, 14.5)))  # the intervals meet
    assert named(made, "capacity of interactive").verdict == "less"
    assert "8.0 % lower in B" in made.verdict[0]
    assert "agree" not in made.verdict[0]


@pytest.mark.parametrize("rate", [0.0, -3.0, math.inf, math.nan])
def test_a_capacity_that_no_search_finds_is_not_compared(rate: float) -> None:
    other = search()
    assert other.tiers[0].slo_capacity is not None
    other.tiers[0].slo_capacity.rate = rate
    with pytest.raises(ConfigError, match="file of B is not to be read: the capacity of 'interactive'"):
        compare_searches(search(), other, force=True)


def test_a_missing_capacity_is_no_difference() -> None:
    made = compare_searches(search(), knee_result([tier_result(slo_capacity=None, status="unresolved")]))
    assert "there is none in B" in made.verdict[0]
    assert any("B is unresolved" in line for line in made.verdict)


def test_probes_at_one_rate_are_set_against_each_other() -> None:
    probes = [unloaded_probe(), simulated_probe(12.0, seed=1, duration_s=60.0)]
    slower = [unloaded_probe(), simulated_probe(12.1, seed=1, duration_s=60.0)]
    for one in slower[1].requests:  # each answer takes half as long again
        assert one.first_token_s is not None
        assert one.end_s is not None
        one.end_s = one.first_token_s + 1.5 * (one.end_s - one.first_token_s)
    made = compare_searches(search(probes=probes), search(probes=slower))
    tpot = named(made, "p95 time per output token at 12 and 12.1/s")
    assert tpot.verdict == "more"
    assert tpot.ratio == pytest.approx(1.5, rel=0.15)
    assert tpot.ratio_ci90 is not None
    assert tpot.ratio_ci90[0] < 1.5 < tpot.ratio_ci90[1]
    assert (tpot.design_effect or 0) > 3, "neighbours share a batch"
    assert any("p95 time per output token" in line and "worse" in line for line in made.verdict)
    assert any("would differ by chance" in line for line in made.verdict)


def test_probes_at_other_rates_are_left_alone() -> None:
    made = compare_searches(search(probes=[simulated_probe(9.0)]), search(probes=[simulated_probe(12.0)]))
    assert not any("time to first token" in one.figure for one in made.differences)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (knee_result([tier_result()], workload={"random_input_len": 900}), "workloads differ in"),
        (knee_result([tier_result(arrival_cv=2.0)]), "arrivals differ: CV 1 and 2"),
        (
            knee_result([tier_result(slo=tier_result().slo.__class__(name="interactive", attainment=0.9))]),
            "promises differ",
        ),
    ],
)
def test_unlike_searches_are_refused_unless_forced(other: KneeResult, reason: str) -> None:
    one = knee_result([tier_result()])
    with pytest.raises(ConfigError, match=reason):
        compare_searches(one, other)
    assert any(reason in line for line in compare_searches(one, other, force=True).forced)


def test_another_seed_is_not_another_workload() -> None:
    one, other = search(), search()
    other.workload = one.workload | {"seed": 5, "nonce": 7}
    assert compare_searches(one, other).forced == []


def test_runs_of_one_build_show_no_difference(tmp_path: Path) -> None:
    made = compare_runs(runs(tmp_path, "a.json", seed=1), runs(tmp_path, "b.json", seed=2))
    tested = [one for one in made.differences if one.ratio_ci90 is not None]
    assert len(tested) >= 9
    assert sum(one.verdict != "no difference shown" for one in tested) <= 2


def test_a_slower_build_is_found(tmp_path: Path) -> None:
    made = compare_runs(runs(tmp_path, "a.json", seed=1), runs(tmp_path, "b.json", seed=2, slower=1.3))
    for figure in ("p50 time to first token", "p50 time per output token", "p95 time to the last token"):
        one = named(made, figure)
        assert one.verdict == "more", figure
        assert one.ratio == pytest.approx(1.3, rel=0.1)
    assert "which is worse" in made.verdict[0]


def test_files_without_single_requests_give_no_interval_and_no_verdict(tmp_path: Path) -> None:
    plain = {name: [] for name in ("start_times", "ttfts", "errors")}
    summary = {"median_ttft_ms": 100.0, "p95_ttft_ms": 190.0, "p99_ttft_ms": 198.0}
    a, b = (runs(tmp_path, f"{name}.json", **plain, **summary) for name in "ab")
    made = compare_runs(a, b)
    assert all(one.ratio_ci90 is None for one in made.differences)
    assert "--save-detailed" in made.verdict[0]


def test_runs_at_other_loads_or_with_other_prompts_are_refused(tmp_path: Path) -> None:
    a = runs(tmp_path, "a.json")
    with pytest.raises(ConfigError, match="no run of one has the load"):
        compare_runs(a, runs(tmp_path, "b.json", request_rate=20.0))
    with pytest.raises(ConfigError, match="workloads differ in random_input_len"):
        compare_runs(a, runs(tmp_path, "b.json", headrace={"workload": {"random_input_len": 5}}))


def test_failures_on_one_side_are_told_as_such(tmp_path: Path) -> None:
    errors = ["it broke" if number % 10 == 0 else "" for number in range(400)]
    b = runs(tmp_path, "b.json", seed=2, errors=errors, completed=360, failed=40)
    made = compare_runs(runs(tmp_path, "a.json", seed=1), b)
    assert any("∞ in B, by its failures" in line for line in made.verdict)
    assert named(made, "share of failures").b == pytest.approx(0.1)


def test_the_command_prints_a_verdict_first_and_ends_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, one in zip(paths, (search(), search(20.0, (19.0, 21.0))), strict=True):
        write_result(one, Path(path))
    assert app(["compare", *paths], standalone_mode=False) in (None, 0)
    printed = capsys.readouterr().out
    assert printed.startswith("The capacity of interactive is 33.3 % higher in B")
    assert "90 % interval" in printed
    app(["compare", *paths, "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert document["differences"][0]["verdict"] == "more"
    assert document["verdict"][0].startswith("The capacity")


def test_a_ratio_that_there_is_none_of_is_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run_file(tmp_path, "a.json", request_goodput=0.0)
    run = ["compare", str(a), str(run_file(tmp_path, "b.json", request_goodput=1.0))]
    app(run, standalone_mode=False)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("goodput"))
    assert "nan" not in line
    assert line.split()[-2:] == ["–", "–"]


def test_infinity_is_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = ["it broke" if number % 10 == 0 else "" for number in range(400)]
    a = run_file(tmp_path, "a.json", seed=1)
    b = run_file(tmp_path, "b.json", seed=2, errors=errors, completed=360, failed=40)
    app(["compare", str(a), str(b), "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert "inf" in [one["b"] for one in document["differences"]]


def test_a_search_and_a_run_are_not_compared(tmp_path: Path) -> None:
    write_result(search(), tmp_path / "knee.json")
    bench = run_file(tmp_path, "bench.json")
    with pytest.raises(ConfigError, match="not of one kind"):
        app(["compare", str(tmp_path / "knee.json"), str(bench), "--force"], standalone_mode=False)
