"""The file of a search, and what is said of it on the terminal."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from loadtest.knee.options import KneeOptions, budget_of
from loadtest.knee.procedure import KneeSearch, SearchOutcome, SearchSettings
from loadtest.knee.result import KneeResult, encode_result, read_result, write_result
from loadtest.knee.run import (
    EXIT_CODES,
    _target,
    declared_hit_share,
    described_workload,
    result_of,
    write_files,
)
from loadtest.knee.simulated_prober import Faults, LengthLaw, SimulatedProber
from loadtest.knee.slo import SloTier
from loadtest.knee.text import text_of
from loadtest.knee_command import knee, recorded_command_line
from loadtest.options import BenchServeOptions
from loadtest.simulator.batching_model import BatchingParameters
from shared.errors import ConfigError

TIER = SloTier("chat", ttft_s=0.5, tpot_s=0.04)


def searched(faults: Faults | None = None, **settings: Any) -> KneeResult:
    """Of a small server, on a virtual clock."""
    prober = SimulatedProber(
        BatchingParameters(step_base_s=0.02, max_num_seqs=8), LengthLaw(60, 0.5, 30, 0.5), faults or Faults()
    )
    usual = {"tiers": (TIER,), "budget_s": 60.0, "twins_allowed": False}
    chosen = SearchSettings(**{**usual, **settings})
    outcome = asyncio.run(KneeSearch(prober, chosen).run())
    options = KneeOptions(
        BenchServeOptions(base_url="http://host:1"), chosen.tiers, chosen.cvs, chosen.budget_s
    )
    return result_of(outcome, options, "small", 7, datetime(2026, 1, 2, tzinfo=UTC), ["throttled"])


@pytest.fixture(scope="module")
def result() -> KneeResult:
    return searched()


def test_a_result_comes_back_from_its_file_as_it_was(result: KneeResult, tmp_path: Path) -> None:
    write_result(result, tmp_path / "knee.json")
    back = read_result(tmp_path / "knee.json")
    assert back.slo_capacity == result.slo_capacity
    assert back.tiers == result.tiers
    assert len(back.probes) == len(result.probes)
    for mine, theirs in zip(back.probes, result.probes, strict=True):
        assert [row.ttft_due for row in mine.requests] == pytest.approx(
            [row.ttft_due for row in theirs.requests], abs=2e-6, nan_ok=True
        )
    assert encode_result(back) == encode_result(result)


def test_the_file_has_the_keys_that_scripts_look_for(result: KneeResult) -> None:
    document = json.loads(encode_result(result))["headrace"]
    assert document["kind"] == "knee"
    assert document["format_version"] == 1
    assert document["slo"] == [{"name": "chat", "attainment": 0.95, "ttft_ms": 500.0, "tpot_ms": 40.0}]
    capacity = document["slo_capacity"]
    assert capacity["ci90"][0] <= capacity["rate"] <= capacity["ci90"][1]
    assert document["tiers"][0]["slo_capacity"] == capacity
    assert document["status"] in ("resolved", "unresolved")
    assert {len(column) for column in document["probes"][0]["requests"].values()} == {
        len(document["probes"][0]["requests"]["due_s"])
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[:-9], "truncated"),
        (lambda text: "[1]", "object"),
        (lambda text: "{}", "headrace"),
        (lambda text: text.replace('"knee"', '"plan"', 1), "'plan', not 'knee'"),
        (lambda text: text.replace('"format_version":1', '"format_version":9'), "9"),
        (lambda text: text.replace('"requests":{', '"requests":{"odd":[1],'), "differ in length"),
        (lambda text: text.replace('"status":', '"state":'), "status"),
    ],
)
def test_a_file_that_is_none_is_refused_with_what_is_wrong(
    tmp_path: Path, change: Any, complaint: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(change(encode_result(searched(tiers=(), budget_s=30.0)).decode()))
    with pytest.raises(ConfigError, match=complaint) as error:
        read_result(path)
    assert "other.json" in str(error.value)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_result(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="cannot write"):
        write_result(searched(tiers=(), budget_s=30.0), tmp_path)


def test_the_text_gives_a_rate_with_its_interval_and_every_condition(result: KneeResult) -> None:
    text = text_of(result)
    assert "chat: 95 % of requests with TTFT ≤ 500 ms, TPOT ≤ 40 ms; Poisson arrivals" in text
    assert "90 % interval" in text
    assert "littles_law" in text
    assert "The server does not report: throttled." in text


def test_the_text_of_a_slow_generator_has_no_rate() -> None:
    text = text_of(searched(Faults(client_cost_s=0.06)))
    assert "CLIENT-BOUND" in text
    assert "90 % interval" not in text


def test_the_text_of_an_invalid_search_shows_the_figure_and_the_reason() -> None:
    text = text_of(searched(Faults(hit_share=0.3)))
    assert "INVALID, do not use: " in text
    assert "BROKEN cache_hit_drift" in text


def test_verdicts_have_exit_codes_of_their_own() -> None:
    assert EXIT_CODES == {"resolved": 0, "unresolved": 0, "infeasible": 3, "client_bound": 4, "invalid": 5}


def test_the_workload_is_told_well_enough_to_repeat_it() -> None:
    load = BenchServeOptions(random_input_len=300, random_prefix_len=100, temperature=0.0, seed=5)
    told = described_workload(load, 9)
    assert told["random_input_len"] == 300
    assert (told["seed"], told["nonce"], told["temperature"]) == (5, 9, 0.0)
    assert told["declared_prefix_hit_share"] == pytest.approx(0.25, abs=0.01)
    assert declared_hit_share(BenchServeOptions(prefix_hit_share=0.4)) == 0.4


def test_the_recorded_command_has_no_secrets() -> None:
    argv = ["/x/headrace", "knee", "--key", "hr-1", "--header", "a=b", "--slo", "ttft=1s", "--key=hr-2"]
    assert recorded_command_line(argv) == "headrace knee --key '***' --header '***' --slo ttft=1s '--key=***'"


def test_a_password_in_a_url_is_sent_and_neither_recorded_nor_printed() -> None:
    load = BenchServeOptions(base_url="http://me:word@host:1")
    outcome = SearchOutcome(SearchSettings(), [])
    told = result_of(outcome, KneeOptions(load), "small", 7, datetime(2026, 1, 2, tzinfo=UTC), [])
    assert b"word" not in encode_result(told)
    assert told.url == "http://host:1/v1/completions"
    assert _target(load, "small").headers == {"Authorization": "Basic bWU6d29yZA=="}
    argv = ["headrace", "knee", "--url", "http://me:word@host", "--url=http://me:word@host"]
    assert recorded_command_line(argv) == "headrace knee --url http://host --url=http://host"


def test_a_budget_has_minutes_and_hours() -> None:
    assert [budget_of(text) for text in ("300", "300s", "5m", "1.5h")] == [300.0, 300.0, 300.0, 5400.0]


def test_a_capacity_that_is_open_on_one_side_is_told_as_a_bound(result: KneeResult) -> None:
    tier = msgspec.structs.replace(result.tiers[0], status="unresolved", open_side="above", feasible_max=9.5)
    text = text_of(msgspec.structs.replace(result, tiers=[tier]))
    assert "UNRESOLVED, so far more than 9.5 requests/s" in text
    assert "% of saturation" not in text
    tier = msgspec.structs.replace(tier, open_side="below", infeasible_min=3.5)
    assert "so far less than 3.5 requests/s" in text_of(msgspec.structs.replace(result, tiers=[tier]))


def test_a_file_that_cannot_be_written_does_not_take_the_other_with_it(
    result: KneeResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "became a folder").mkdir()
    options = KneeOptions(
        BenchServeOptions(), json_file=tmp_path / "became a folder", report_file=tmp_path / "knee.html"
    )
    assert not write_files(result, options)
    assert "error: --json: cannot write" in capsys.readouterr().err
    assert (tmp_path / "knee.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "flag", "complaint"),
    [
        (["--budget", "5s"], "--budget", "at least 20s"),
        (["--budget", "soon"], "--budget", "like 300s, 5m or 1h"),
        (["--budget", "500ms"], "--budget", "at least 20s, got 0.5s"),
        (["--tolerance", "2"], "--tolerance", "between"),
        (["--attainment", "1"], "--attainment", "between"),
        (["--cv", "-1"], "--cv", "between"),
        (["--header", "odd"], "--header", "KEY=VALUE"),
        (["--url", "ftp://host"], "--url", "http"),
        (["--url", "http://[::1"], "--url", "not an http URL"),
        (["--url", "http://h:abc"], "--url", "not an http URL"),
        (["--url", "http://h:99999"], "--url", "not an http URL"),
        (["--url", "http://me:word@h", "--key", "k"], "--url", "leave one out"),
        (["--endpoint", "foo"], "--endpoint", "begins with /"),
        (["--metrics-url", "http://h:99999/metrics"], "--metrics-url", "not an http URL"),
        (["--model", "m", "--url", "http://127.0.0.1:1"], "--url", "cannot reach"),
        (["--dataset-name", "azure", "--dataset-path", "x"], "--dataset-name", "times of its own"),
        (["--max-concurrency", "1"], "--max-concurrency", "at least 2"),
        (["--json", "/no/such/folder/x.json"], "--json", "no folder"),
        (["--json", "/"], "--json", "is a folder"),
        (["--report", "/"], "--report", "is a folder"),
        (["--json", "x.json", "--report", "./x.json"], "--report", "same file"),
    ],
)
def test_flags_that_cannot_work_are_named_before_anything_is_sent(
    arguments: list[str], flag: str, complaint: str
) -> None:
    app = typer.Typer()
    app.command()(knee)
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert error.param == flag
    assert complaint in error.message
