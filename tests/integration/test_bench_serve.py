"""`headrace bench serve` against a real HTTP server whose delays, tokens and faults are known."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.options import BenchServeOptions
from loadtest.serve import run_bench_serve
from shared.errors import ConfigError
from tests.planted_server import FIRST_TOKEN_DELAY_S, TOKEN_DELAY_S, PlantedServer, planted_server

SLACK_S = 0.25  # for a busy machine; the delays' lower bounds are what a test leans on


@pytest.fixture(scope="module")
def running_server() -> Iterator[PlantedServer]:
    with planted_server() as planted:
        yield planted


@pytest.fixture
def server(running_server: PlantedServer) -> PlantedServer:
    running_server.forget()
    return running_server


@dataclass
class Bench:
    server: PlantedServer
    directory: Path

    def run(self, **options: Any) -> tuple[int, dict[str, Any]]:
        """The exit code and the result file."""
        settings: dict[str, Any] = {
            "port": self.server.port,
            "random_input_len": 12,
            "random_output_len": 8,
            "result_filename": "result.json",
            "result_dir": self.directory,
            "save_result": True,
            "save_detailed": True,
            **options,
        }
        exit_code = run_bench_serve(BenchServeOptions(**settings))
        return exit_code, json.loads((self.directory / settings["result_filename"]).read_text())


@pytest.fixture
def bench(server: PlantedServer, tmp_path: Path) -> Bench:
    return Bench(server, tmp_path)


def test_counts_and_latencies_are_those_of_the_server(bench: Bench) -> None:
    exit_code, result = bench.run(model="steady", num_prompts=6, max_concurrency=2)
    assert exit_code == 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 12, 6 * 8)
    assert result["output_lens"] == [8] * 6
    assert result["max_concurrent_requests"] == 2
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])

    assert min(result["ttfts"]) >= FIRST_TOKEN_DELAY_S
    assert result["mean_ttft_ms"] <= 1000 * (FIRST_TOKEN_DELAY_S + SLACK_S)
    written = bench.server.chunk_times_ns
    tpots_ms = [(times[-1] - times[0]) / 7 / 1e6 for times in written]
    assert result["mean_tpot_ms"] == pytest.approx(sum(tpots_ms) / 6, abs=1000 * SLACK_S / 7)
    assert [len(gaps) for gaps in result["itls"]] == [7] * 6


def test_events_of_a_request_are_in_order_on_one_clock(bench: Bench) -> None:
    _, result = bench.run(model="steady", num_prompts=3, max_concurrency=1)
    for request, written in zip(result["headrace"]["requests"], bench.server.chunk_times_ns, strict=True):
        assert all(seen > sent for seen, sent in zip(request["chunk_times_ns"], written, strict=True))
        times = [request[f"t_{name}_ns"] for name in ("due", "sent", "headers", "first_event", "first_token")]
        times += [request["chunk_times_ns"][-1], request["t_end_ns"]]
        assert times == sorted(times)
        assert all(type(moment) is int for moment in times)


def test_prompts_go_out_as_distinct_token_ids_with_exact_lengths(bench: Bench) -> None:
    bench.run(model="steady", num_prompts=4, max_concurrency=4, temperature=0.0, api_key="hr-k")
    bodies = bench.server.bodies
    assert {len(body["prompt"]) for body in bodies} == {12}
    assert len({body["prompt"][0] for body in bodies}) == 4
    assert {body["max_tokens"] for body in bodies} == {8}
    assert {body["min_tokens"] for body in bodies} == {8}
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    assert {headers["Authorization"] for headers in bench.server.headers} == {"Bearer hr-k"}
    assert "hr-k" not in (bench.directory / "result.json").read_text()


def test_failed_requests_are_counted_named_and_make_the_exit_code(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, result = bench.run(model="often-busy", num_prompts=9, max_concurrency=3)
    assert exit_code == 1
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["total_output_tokens"] == 6 * 8
    assert [error for error in result["errors"] if error] == ["HTTP 503: try later"] * 3
    assert result["headrace"]["failures"] == {"http_status": 3}
    assert result["headrace"]["ttft_due_ms"]["count"] == 9
    assert result["headrace"]["ttft_due_ms"]["p99"] == "inf"
    shown = capsys.readouterr()
    assert "3 of 9 requests failed" in shown.err
    assert f"{'Failed requests:':<40} 3" in shown.out


def test_broken_streams_after_200_ok_are_failures(bench: Bench) -> None:
    exit_code, result = bench.run(model="faulty", num_prompts=5, max_concurrency=1)
    assert exit_code == 1
    assert (result["completed"], result["failed"]) == (1, 4)
    kinds = [request["failure"] for request in result["headrace"]["requests"]]
    assert kinds == [None, "cut", "error_event", "cut", "cut"]
    assert result["errors"][2] == "engine died"
    assert "[DONE]" in result["errors"][3]
    assert "finish_reason" in result["errors"][4]
    # What arrived before the fault is kept, but in no statistics.
    assert [len(gaps) for gaps in result["itls"]] == [7, 1, 1, 1, 1]
    assert result["headrace"]["e2el_due_ms"]["count"] == 5


@pytest.mark.parametrize(("model", "kind"), [("silent", "empty"), ("garbled", "bad_stream")])
def test_answers_without_tokens_or_sense_are_failures(bench: Bench, model: str, kind: str) -> None:
    exit_code, result = bench.run(model=model, num_prompts=2, max_concurrency=1)
    assert exit_code == 1
    assert result["headrace"]["failures"] == {kind: 2}
    assert result["mean_ttft_ms"] is None


def test_request_that_never_ends_is_given_up_and_counted(bench: Bench) -> None:
    exit_code, result = bench.run(model="hanging", num_prompts=1, max_concurrency=1, request_timeout_s=0.3)
    assert exit_code == 1
    assert result["headrace"]["failures"] == {"timeout": 1}


def test_chat_with_an_early_role_delta_keeps_both_first_tokens(bench: Bench) -> None:
    _, result = bench.run(backend="openai-chat", model="role-first", num_prompts=3, max_concurrency=1)
    content_ms = result["headrace"]["ttft_content_ms"]["p50"]
    assert content_ms >= 1000 * FIRST_TOKEN_DELAY_S
    # vLLM's rule takes the role delta, which left the server a whole delay earlier.
    assert result["median_ttft_ms"] <= content_ms - 1000 * FIRST_TOKEN_DELAY_S / 2
    assert "choices" in result["headrace"]["ttft_rule"]
    assert result["input_lens"] == [12 + 5] * 3  # as usage says, template included
    assert bench.server.bodies[0]["messages"][0]["role"] == "user"


def test_several_tokens_in_a_chunk_keep_tpot_per_token_and_itl_per_chunk(bench: Bench) -> None:
    _, result = bench.run(model="bundled", num_prompts=3, max_concurrency=1, random_output_len=16)
    assert result["headrace"]["tokens_per_chunk"] == 4
    assert [len(gaps) for gaps in result["itls"]] == [3] * 3
    request = result["headrace"]["requests"][0]
    span_ns = request["chunk_times_ns"][-1] - request["chunk_times_ns"][0]
    assert sum(result["itls"][0]) * 1e9 == pytest.approx(span_ns)
    assert result["mean_tpot_ms"] == pytest.approx(result["mean_itl_ms"] * 3 / 15)


def test_server_without_usage_leaves_token_figures_open(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, result = bench.run(model="no-usage", num_prompts=2, max_concurrency=1)
    assert exit_code == 0
    assert (result["total_output_tokens"], result["output_throughput"], result["mean_tpot_ms"]) == (None,) * 3
    assert result["mean_ttft_ms"] >= 1000 * FIRST_TOKEN_DELAY_S
    assert result["total_input_tokens"] == 24  # we sent the ids, so that much is known
    assert result["headrace"]["server"]["not_reported"][0] == "usage"
    assert "no usage" in capsys.readouterr().err


def test_open_loop_charges_the_wait_for_a_slot_to_the_due_latency(bench: Bench) -> None:
    """Four due within 20 ms, one slot: the last one waits for three others."""
    _, result = bench.run(model="steady", num_prompts=4, request_rate=200.0, max_concurrency=1)
    one_answer_ms = 1000 * (FIRST_TOKEN_DELAY_S + 7 * TOKEN_DELAY_S)
    extras = result["headrace"]
    assert extras["loop"] == "open"
    last = max(extras["requests"], key=lambda request: request["t_sent_ns"])
    assert (last["t_sent_ns"] - last["t_due_ns"]) / 1e6 >= 2 * one_answer_ms
    assert extras["ttft_due_ms"]["p99"] >= result["p99_ttft_ms"] + one_answer_ms
    assert result["p99_client_queue_time_ms"] == pytest.approx(extras["dispatch_lag_ms"]["p99"])


def test_open_loop_without_a_limit_is_not_held_back_by_a_pool_of_connections(bench: Bench) -> None:
    _, result = bench.run(model="slow-start", num_prompts=150)
    assert result["failed"] == 0
    assert bench.server.most_running == 150  # aiohttp's own limit would be 100


def test_sweep_makes_a_file_for_each_level_and_one_table(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = BenchServeOptions(
        port=bench.server.port,
        concurrency_sweep=(1, 3),
        num_prompts=3,
        num_warmups=1,
        random_input_len=4,
        random_output_len=2,
        result_dir=tmp_path,
        save_result=True,
    )
    assert run_bench_serve(options) == 0
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*concurrency*.json"))]
    assert [result["max_concurrency"] for result in results] == [1, 3]
    assert {result["model_id"] for result in results} == {"steady"}  # the first that the server lists
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert [row.split("|")[1].strip() for row in table[2:]] == ["1", "3"]
    # 2 levels x (1 warm-up + 3): no prompt twice.
    first_ids = [tuple(body["prompt"]) for body in bench.server.bodies]
    assert len(first_ids) == len(set(first_ids)) == 8


def test_no_server_and_no_model_name_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--base-url") as raised:
        run_bench_serve(BenchServeOptions(port=1))
    assert raised.value.param == "--model"


METRICS_PAGE = """vllm:num_requests_running 1
vllm:prefix_cache_queries_total {tokens}
vllm:prefix_cache_hits_total 0
"""


def test_servers_own_figures_are_read_during_the_run_and_what_it_lacks_is_listed(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.server.metrics_page = METRICS_PAGE
    _, result = bench.run(model="steady", num_prompts=3, max_concurrency=1)
    told = result["headrace"]["server"]
    assert (told["samples"][0]["prefix_queries"], told["samples"][-1]["prefix_queries"]) == (0, 36)
    assert told["prefix_hit_share"] == 0
    assert "kv_usage" in told["not_reported"]
    assert "running" not in told["not_reported"]
    assert "does not report: waiting, kv_usage" in capsys.readouterr().err
    checks = {check["check"]: check for check in result["headrace"]["validity"]}
    assert checks["prefix_hit_share"]["passed"]


def test_cache_that_serves_less_than_the_workload_plants_is_said(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.server.metrics_page = METRICS_PAGE
    _, result = bench.run(model="steady", num_prompts=4, max_concurrency=1, random_prefix_len=36)
    check = next(one for one in result["headrace"]["validity"] if one["check"] == "prefix_hit_share")
    assert not check["passed"]
    assert "0.0% of the prompt tokens came from the prefix cache, declared are 56.2%" in check["reason"]
    assert check["reason"] in capsys.readouterr().err


def test_server_without_figures_is_measured_all_the_same(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, result = bench.run(model="steady", num_prompts=1, max_concurrency=1)
    assert exit_code == 0
    assert "HTTP 404" in result["headrace"]["server"]["problem"]
    assert len(result["headrace"]["server"]["not_reported"]) == 9
    assert "no server metrics" in capsys.readouterr().err


def test_ramp_by_duration_leaves_its_keys_and_its_changes(bench: Bench) -> None:
    _, result = bench.run(
        model="steady", duration_s=0.5, ramp_up_strategy="linear", ramp_up_start_rps=10, ramp_up_end_rps=50
    )
    assert (result["ramp_up_strategy"], result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == (
        "linear",
        10,
        50,
    )
    rates = [event["rps"] for event in result["rps_change_events"]]
    assert rates == sorted(set(rates))
    assert len(rates) >= 3
    assert result["num_prompts"] == result["completed"] == len(bench.server.bodies)
    assert result["headrace"]["loop"] == "open"


def test_trace_is_replayed_with_its_own_times_and_shared_prefixes(bench: Bench) -> None:
    path = bench.directory / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"timestamp": 600, "input_length": 11, "output_length": 3, "hash_ids": [1, 2, 4]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    _, result = bench.run(
        model="steady",
        dataset_name="timed_trace",
        dataset_path=path,
        timed_trace_chunk_hash_size=4,
        trace_time_scale=0.5,
    )
    first, second = bench.server.bodies
    assert first["prompt"][:8] == second["prompt"][:8]
    assert (first["max_tokens"], second["max_tokens"]) == (2, 3)
    requests = result["headrace"]["requests"]
    assert requests[1]["t_due_ns"] - requests[0]["t_due_ns"] == 300_000_000
    assert result["headrace"]["workload"]["prefix_hit_share"] == pytest.approx(8 / 21)


def test_tenants_of_a_file_are_reported_apart(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.directory / "tenants.toml"
    path.write_text(
        '[[tenants]]\nname = "a"\napi_key = "secret-a"\n[[tenants]]\nname = "b"\nmodel = "silent"\n'
    )
    exit_code, result = bench.run(model="steady", num_prompts=12, max_concurrency=4, tenants=path)
    assert exit_code == 1
    tenants = result["headrace"]["tenants"]
    assert tenants["a"]["attempted"] + tenants["b"]["attempted"] == 12
    assert (tenants["a"]["failed"], tenants["b"]["failed"]) == (0, tenants["b"]["attempted"])
    assert tenants["b"]["ttft_due_ms"]["p50"] == "inf"
    keys = {
        body["model"]: headers.get("Authorization")
        for body, headers in zip(bench.server.bodies, bench.server.headers, strict=True)
    }
    assert keys == {"steady": "Bearer secret-a", "silent": None}
    assert "secret-a" not in (bench.directory / "result.json").read_text()
    assert re.search(r"\| +b \|", capsys.readouterr().out)


def test_requests_are_written_one_per_line_beside_the_result(bench: Bench) -> None:
    _, result = bench.run(model="often-busy", num_prompts=3, max_concurrency=1)
    lines = (bench.directory / "result.requests.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["failure"] for record in records] == [None, None, "http_status"]
    assert [len(record["trace_id"]) for record in records] == [32] * 3
    assert records[0]["chunk_times_ns"] == result["headrace"]["requests"][0]["chunk_times_ns"]


def test_two_processes_report_as_one_run(bench: Bench) -> None:
    _, result = bench.run(model="steady", num_prompts=8, request_rate=50.0, num_workers=2)
    assert result["completed"] == 8
    assert result["headrace"]["num_workers"] == 2
    assert [request["index"] for request in result["headrace"]["requests"]] == list(range(8))


def test_server_that_is_not_ready_in_time_is_an_error_with_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"not ready after 0.2 s: cannot reach") as raised:
        run_bench_serve(BenchServeOptions(port=1, model="m", ready_check_timeout_s=0.2))
    assert raised.value.param == "--ready-check-timeout-sec"


def as_vllms_converter(path: Path) -> dict[str, Any]:
    """What vLLM's script of nightly results makes of a file: it takes files with `serving` in their name,
    reads the commands from a sibling, and renames keys to columns."""
    assert "serving" in str(path)
    row: dict[str, Any] = json.loads(path.read_text())
    commands = json.loads(path.with_suffix(".commands").read_text())
    arguments = shlex.split(commands["client_command"])
    for flag, column in (
        ("--dataset-name", "dataset_name"),
        ("--random-input-len", "input_len"),
        ("--random-output-len", "output_len"),
        ("--request-rate", "qps"),
    ):
        row[column] = arguments[arguments.index(flag) + 1]
    columns = ["model_id", "dataset_name", "input_len", "output_len", "completed", "qps", "max_concurrency"]
    columns += ["request_throughput", "total_token_throughput", "output_throughput"]
    columns += [
        f"{statistic}_{metric}_ms"
        for metric in ("ttft", "tpot")
        for statistic in ("mean", "median", "p99", "std")
    ]
    columns += ["mean_itl_ms", "median_itl_ms", "p99_itl_ms"]
    return {column: row[column] for column in columns}


def pareto_point(row: dict[str, Any], num_gpus: int) -> tuple[float, float]:
    """What vLLM's sweep plots: tokens per second and user, against those per GPU."""
    num_users = row.get("max_concurrency") or row["max_concurrent_requests"]
    return row["output_throughput"] / num_users, row["output_throughput"] / num_gpus


def test_scripts_for_vllms_results_read_ours(bench: Bench) -> None:
    rows = []
    for concurrency in (1, 4):
        name = f"serving_tiny_tp1_concurrency{concurrency}.json"
        _, result = bench.run(
            model="org/steady", served_model_name="steady", num_prompts=4, max_concurrency=concurrency,
            result_filename=name, metadata={"gpu_type": "none", "tp_size": "1"},
        )  # fmt: skip
        commands = {
            "server_command": "vllm serve org/steady --tensor-parallel-size 1",
            "client_command": "vllm bench serve --dataset-name random --random-input-len 12 "
            "--random-output-len 8 --request-rate inf",
        }
        (bench.directory / name).with_suffix(".commands").write_text(json.dumps(commands))
        rows.append(as_vllms_converter(bench.directory / name))
        assert result["gpu_type"] == "none"
        assert all(math.isfinite(value) for value in pareto_point(result, 1))
        for array in ("input_lens", "output_lens", "ttfts", "itls", "errors", "generated_texts", "latencies"):
            assert len(result[array]) == 4
    numbers = {name for name in rows[0] if isinstance(rows[0][name], int | float)}
    assert numbers == set(rows[0]) - {"model_id", "dataset_name", "input_len", "output_len", "qps"}
    assert [row["max_concurrency"] for row in rows] == [1, 4]  # what the compare script joins on


def test_load_beyond_the_generator_is_called_client_bound(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three hundred due within a few milliseconds, each on a connection that must first be opened."""
    _, result = bench.run(model="steady", num_prompts=300, request_rate=50_000.0, random_output_len=1)
    assert result["headrace"]["client_bound"] is True
    failed = {check["check"] for check in result["headrace"]["validity"] if not check["passed"]}
    assert "dispatch_lag_p99_ms" in failed
    shown = capsys.readouterr()
    assert re.search(r"Load generator: +CLIENT-BOUND", shown.out)
    assert "CLIENT-BOUND: the generator sent 99% of the requests within" in shown.err


def test_answers_in_one_piece_are_measured_without_first_tokens(bench: Bench) -> None:
    exit_code, result = bench.run(model="steady", num_prompts=3, max_concurrency=1, streaming=False)
    assert exit_code == 0
    assert (result["mean_ttft_ms"], result["mean_tpot_ms"], result["mean_itl_ms"]) == (None, None, None)
    assert result["mean_e2el_ms"] > 0
    assert result["total_output_tokens"] == 24
    assert result["headrace"]["ttft_due_ms"]["count"] == 3
    assert {body["stream"] for body in bench.server.bodies} == {False}
