"""The benchmark against peers: what it computes of measurements, refuses, and finds out about processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.machine import Machine
from shared.errors import ConfigError
from tests.benchmarks.peers.case import CASES, MEMORY, OUTPUT, TPOT, WHOLE_LIFE
from tests.benchmarks.peers.ceilings import Ceilings
from tests.benchmarks.peers.comparison import best_of, kept, lives, ratios, spreads
from tests.benchmarks.peers.contestant import Absent, Contestant
from tests.benchmarks.peers.install import _requirements
from tests.benchmarks.peers.instruction_set import is_wider_than_avx2
from tests.benchmarks.peers.measurement import Measurement, error_of, figures_of
from tests.benchmarks.peers.options import chosen, parse_options
from tests.benchmarks.peers.report import Background, Report
from tests.benchmarks.peers.rounds import in_turn, nonce_of


def output(server: str, round_number: int, tokens_per_s: float, **rest: Any) -> Measurement:
    return Measurement(server, round_number, "c8", figures={OUTPUT.key: tokens_per_s}, **rest)


def contestant(name: str, family: str = "llama", command: Sequence[str] = ("true",)) -> Contestant:
    return Contestant(name, family, "1.0", command=lambda _: command, health_path="/health")


# What measurements come to.


def test_a_spread_is_the_median_between_the_lowest_and_the_highest_of_all_rounds() -> None:
    measured = [output("ours", 1, 30.0), output("ours", 2, 10.0), output("ours", 3, 20.0)]
    spread = spreads(measured, "c8", OUTPUT, num_rounds=3)["ours"]
    assert (spread.median, spread.lowest, spread.highest, spread.num_rounds) == (20.0, 10.0, 30.0, 3)


def test_a_server_that_failed_in_one_round_has_no_figure_of_the_case() -> None:
    measured = [
        output("good", 1, 10.0),
        output("good", 2, 12.0),
        output("bad", 1, 90.0),
        output("bad", 2, 95.0, error="3 of 64 requests failed"),
    ]
    assert list(spreads(measured, "c8", OUTPUT, num_rounds=2)) == ["good"]


def test_the_best_peer_is_the_highest_or_the_lowest_as_the_figure_points() -> None:
    measured = [
        Measurement(server, 1, "c1", figures={OUTPUT.key: rate, TPOT.key: 1000 / rate})
        for server, rate in (("slow", 50.0), ("fast", 80.0), ("middling", 60.0))
    ]
    for figure in (OUTPUT, TPOT):
        found = spreads(measured, "c1", figure, num_rounds=1)
        assert best_of(found, ["slow", "middling", "fast"], figure) == "fast"
        assert best_of(found, ["slow", "middling", "absent"], figure) == "middling"
    assert best_of({}, ["slow"], OUTPUT) is None


def test_a_ratio_above_one_means_better_whichever_way_the_figure_points() -> None:
    measured = [
        Measurement("ours", 1, "c1", figures={OUTPUT.key: 200.0, TPOT.key: 5.0}),
        Measurement("peer", 1, "c1", figures={OUTPUT.key: 100.0, TPOT.key: 9.0}),
        Measurement("other", 1, "c1", figures={OUTPUT.key: 40.0, TPOT.key: 8.0}),
    ]
    for figure, best_peer, times_better in ((OUTPUT, "peer", 2.0), (TPOT, "other", 1.6)):
        [ratio] = ratios(spreads(measured, "c1", figure, 1), ["ours"], ["peer", "other"], figure)
        assert ratio.best_peer == best_peer
        assert ratio.times_better == pytest.approx(times_better)


def test_without_a_peer_that_worked_there_is_no_ratio() -> None:
    measured = [output("ours", 1, 10.0), output("peer", 1, 5.0, error="server: ended with 1")]
    assert ratios(spreads(measured, "c8", OUTPUT, 1), ["ours"], ["peer"], OUTPUT) == []


def test_of_several_attempts_the_least_disturbed_counts_and_one_without_an_error_before_all_others() -> None:
    first = output("ours", 1, 10.0, attempt=1, foreign_cores=0.9)
    second = output("ours", 1, 11.0, attempt=2, foreign_cores=0.3)
    third = output("ours", 1, 12.0, attempt=3, foreign_cores=0.0, error="cut")
    assert kept([first, second, third]) == [second]
    assert kept([third]) == [third]


def test_the_memory_of_a_life_is_the_peak_of_all_its_cases_and_attempts() -> None:
    measured = [
        Measurement("ours", 1, case, attempt, {MEMORY.key: mebibytes})
        for case, attempt, mebibytes in (("c1", 1, 500.0), ("c8", 1, 700.0), ("c8", 2, 650.0))
    ]
    measured.append(Measurement("never ready", 1, "c1", error="server: not ready in time"))
    assert [(each.server, each.case, each.figures) for each in lives(measured)] == [
        ("ours", WHOLE_LIFE, {MEMORY.key: 700.0})
    ]


# What the client's result says.


def client_result(**changes: Any) -> dict[str, Any]:
    case = CASES["c8"]
    return {
        "num_prompts": case.num_requests,
        "failed": 0,
        "duration": 20.0,
        "total_input_tokens": case.num_requests * case.prompt_len,
        "total_output_tokens": case.num_requests * case.output_len,
        "output_throughput": 204.8,
        "total_token_throughput": 614.4,
        "median_ttft_ms": 256.0,
        "p95_ttft_ms": 300.0,
        "median_tpot_ms": 30.0,
        "median_itl_ms": None,
        "headrace": {"failures": {}},
        **changes,
    }


def test_figures_are_those_of_the_result_and_unknown_ones_are_left_out() -> None:
    figures = figures_of(client_result(), CASES["c8"])
    assert figures[OUTPUT.key] == 204.8
    assert figures["prefill_tokens_per_s"] == 500.0  # 128 tokens in 256 ms
    assert "itl_p50_ms" not in figures
    assert error_of(client_result(), CASES["c8"]) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"failed": 3, "headrace": {"failures": {"cut": 1, "empty": 2}}},
            "3 of 64 requests failed (cut, empty)",
        ),
        ({"total_output_tokens": 4000}, "answered with 4000 tokens instead of 4096"),
        ({"total_output_tokens": None}, "no usage"),
        ({"total_input_tokens": 9000}, "read 9000 tokens instead of 8192"),
    ],
)
def test_other_work_than_that_of_the_case_is_an_error(changes: dict[str, Any], complaint: str) -> None:
    assert complaint in (error_of(client_result(**changes), CASES["c8"]) or "")


def test_a_token_that_begins_each_prompt_is_no_error() -> None:
    assert error_of(client_result(total_input_tokens=64 * 129), CASES["c8"]) is None


# Options.


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("--rounds 0", "--rounds"),
        ("--tries 0", "--tries"),
        ("--threads 0", "--threads"),
        ("--seed -1", "--seed"),
        ("--seed 4001", "--seed"),
        ("--cases c1,c9", "--cases"),
        ("--cases ,", "--cases"),
        ("--case-timeout-s 0", "--case-timeout-s"),
        ("--ready-timeout-s nan", "--ready-timeout-s"),
        ("--max-foreign-cores -1", "--max-foreign-cores"),
        ("--headrace-config turbo", "--headrace-config"),
        ("--headrace-config =a.toml", "--headrace-config"),
        ("--headrace-config int8 --headrace-config int8=a.toml", "--headrace-config"),
        ("--output /nowhere/at/all.md", "--output"),
        (f"--result-dir {Path(__file__).parent}", "--result-dir"),
    ],
)
def test_nonsense_is_refused_under_the_name_of_its_flag(arguments: str, flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_options(arguments.split())
    assert refused.value.param == flag


def test_by_default_two_built_in_configurations_do_every_case_three_times() -> None:
    options = parse_options([])
    assert [name for name, _ in options.headrace_configs] == ["stored", "kv-int8", "int16"]
    assert [case.name for case in options.cases] == ["c1", "c8", "c32", "prefill512", "shared"]
    assert (options.num_rounds, options.instruction_set, options.peers) == (3, "native", None)


def test_peers_are_chosen_by_name_or_family() -> None:
    present = [contestant("llama-q8_0"), contestant("llama-q4_1"), contestant("openvino-int8", "openvino")]
    assert chosen(present, None) == present
    assert chosen(present, ("openvino", "llama-q4_1", "llama")) == [present[2], present[1], present[0]]
    assert chosen(present, ()) == []
    with pytest.raises(ConfigError, match=r"no peer 'vllm' is installed; installed: llama-q8_0, llama-q4_1"):
        chosen(present, ("vllm",))


# The order of it.


def test_every_server_comes_first_in_some_round() -> None:
    servers = [contestant(name) for name in "abc"]
    assert ["".join(each.name for each in in_turn(servers, number)) for number in (1, 2, 3, 4)] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]


def test_no_two_runs_on_one_server_have_the_same_prompts() -> None:
    runs = [(seed, number, case, attempt) for seed in (0, 1) for number in (1, 2, 999)
            for case in CASES.values() for attempt in (1, 2, 99)]  # fmt: skip
    assert len({nonce_of(*run) for run in runs}) == len(runs)


def test_what_goes_beyond_avx2_is_seen_in_the_flags() -> None:
    assert not is_wider_than_avx2("flags\t\t: fpu sse4_2 avx avx2 fma f16c\n")
    for wide in ("avx512f", "avx_vnni", "amx_tile"):
        assert is_wider_than_avx2(f"model name\t: some CPU\nflags\t\t: fpu avx2 {wide} fma\n")


def test_of_the_requirements_of_vllm_extras_and_another_torch_are_left_out() -> None:
    declared = [
        "numpy>=1",
        "torch==9.9",
        'torchvision==1; python_version > "3"',
        'tensorizer; extra == "tensorizer"',
    ]
    assert _requirements([*declared, 'msgspec; python_version > "3"']) == ["numpy>=1", "msgspec"]


# The report.

BACKGROUND = Background(
    date="2026-01-02",
    machine=Machine("Some CPU", 2, 8 * 2**30, "Linux x86_64", "3.11.7"),
    instruction_set="avx2",
    is_narrowed=True,
    num_threads=2,
    commit="abc123",
    torch="2.13.0",
    ceilings=Ceilings(20.0, 100.0, 200.0, 300.0),
    versions=[("llama", "1.0")],
    absent=[Absent("vllm", "not installed")],
    num_rounds=2,
    max_foreign_cores=0.15,
    command="python -m tests.benchmarks.peers",
)


def report(measured: Sequence[Measurement]) -> str:
    ours, peers = ["headrace-int8"], ["llama-q8_0", "llama-q4_1"]
    return Report(BACKGROUND, [CASES["c8"]], ours, peers, measured).text()


def row_of(text: str, *beginning: str) -> list[str]:
    """The cells of the first row that begins with these."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if tuple(cells[: len(beginning)]) == beginning:
            return cells
    raise AssertionError(f"no row {beginning} in\n{text}")


def test_the_report_has_the_ratio_to_the_best_peer_and_the_spread_of_each_server() -> None:
    text = report(
        [
            *(output("headrace-int8", number, rate) for number, rate in ((1, 200.0), (2, 220.0))),
            *(output("llama-q8_0", number, rate) for number, rate in ((1, 100.0), (2, 110.0))),
            *(output("llama-q4_1", number, rate) for number, rate in ((1, 70.0), (2, 60.0))),
        ]
    )
    assert row_of(text, "c8")[2:] == ["llama-q8_0", "105", "headrace-int8", "210", "2.00 ×"]
    assert row_of(text, "headrace-int8")[1] == "**210** (200–220)"
    assert row_of(text, "llama-q4_1")[1] == "65.0 (60.0–70.0)"
    assert "Some CPU, 2 cores, 8 GiB" in text
    assert "vllm takes no part: not installed" in text
    assert "Failures" not in text


def test_failures_and_disturbances_are_told_and_never_hidden() -> None:
    text = report(
        [
            *(output("headrace-int8", number, 200.0, foreign_cores=0.01) for number in (1, 2)),
            output("llama-q8_0", 1, 100.0, foreign_cores=0.01),
            Measurement("llama-q8_0", 2, "c8", error="server: ended with 1: out of memory"),
            output("llama-q4_1", 1, 70.0, attempt=1, foreign_cores=0.6),
            output("llama-q4_1", 1, 71.0, attempt=2, foreign_cores=0.02),
            output("llama-q4_1", 2, 60.0, attempt=1, foreign_cores=0.5),
        ]
    )
    assert row_of(text, "llama-q8_0")[1] == "failed, see below"
    assert "- round 2, llama-q8_0, c8: server: ended with 1: out of memory" in text
    assert row_of(text, "c8")[2] == "llama-q4_1"  # the best of those that worked
    assert row_of(text, "llama-q4_1 †")
    assert re.search(r"round 1, llama-q4_1, c8, attempt 1: 0\.60 cores$", text, re.MULTILINE)
    assert "round 2, llama-q4_1, c8, attempt 1: 0.50 cores, counted all the same" in text
