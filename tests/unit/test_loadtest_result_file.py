"""The result object: vLLM's keys at the top, ours under `headrace`, valid JSON whatever happened."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from loadtest.generator import LoadRun
from loadtest.machine import describe_machine
from loadtest.options import BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.result_file import Provenance, RunSetting, result_object, result_path, write_result
from loadtest.summary import summarise

MS = 1_000_000
SETTING = RunSetting("org/tiny", 8, 2, nonce=5, num_distinct_prompts=2)

VLLM_SCALARS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests", "rtfx",
}  # fmt: skip
VLLM_ARRAYS = {
    "input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"
}  # fmt: skip
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99")


def result_of(options: BenchServeOptions, *records: RequestRecord) -> dict[str, Any]:
    run = LoadRun(list(records), 0, 1000 * MS, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    summary = summarise(run, options.metric_percentiles, options.goodput_ms)
    return result_object(options, SETTING, run, summary, Provenance(describe_machine(), "abc"))


def good_record() -> RequestRecord:
    return RequestRecord(
        index=0,
        num_output_tokens_asked=3,
        t_due_ns=0,
        num_prompt_tokens=7,
        num_output_tokens=3,
        t_sent_ns=2 * MS,
        t_first_token_ns=12 * MS,
        chunk_times_ns=[12 * MS, 22 * MS, 32 * MS],
        t_end_ns=33 * MS,
        text="a b c",
    )


def bad_record() -> RequestRecord:
    record = RequestRecord(1, 3, 0, t_sent_ns=3 * MS, t_end_ns=4 * MS)
    record.failure, record.error = "http_status", "HTTP 500: no"
    return record


def test_keys_are_vllms_and_everything_else_is_under_headrace() -> None:
    result = result_of(BenchServeOptions(), good_record(), bad_record())
    statistics = {f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS}
    assert set(result) == VLLM_SCALARS | statistics | {"latencies", "queue_times", "headrace"}
    assert result["date"] == "20260102-030405"
    assert result["request_rate"] == "inf"
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["mean_ttft_ms"] == pytest.approx(10)
    assert result["headrace"]["failures"] == {"http_status": 1}
    assert result["headrace"]["ttft_due_ms"]["p99"] == "inf"
    assert result["headrace"]["commit"] == "abc"


def test_detailed_result_holds_every_request_with_failures_in_their_place() -> None:
    result = result_of(BenchServeOptions(save_detailed=True), good_record(), bad_record())
    assert set(result) >= VLLM_ARRAYS
    assert result["ttfts"] == [pytest.approx(0.010), 0.0]
    assert result["itls"] == [[pytest.approx(0.010)] * 2, []]
    assert result["output_lens"] == [3, 0]
    assert result["errors"] == ["", "HTTP 500: no"]
    assert result["generated_texts"] == ["a b c", ""]
    first, second = result["headrace"]["requests"]
    assert first["chunk_times_ns"] == [12 * MS, 22 * MS, 32 * MS]
    assert second["t_first_token_ns"] is None
    assert second["failure"] == "http_status"


def test_metadata_and_extra_percentiles_become_keys() -> None:
    options = BenchServeOptions(metadata={"gpu_type": "none"}, metric_percentiles=(75.0, 99.9))
    result = result_of(options, good_record())
    assert result["gpu_type"] == "none"
    assert {"p75_tpot_ms", "p99.9_tpot_ms", "p99_tpot_ms"} <= set(result)


def test_a_result_without_any_success_is_still_valid_json(tmp_path: Path) -> None:
    result = result_of(BenchServeOptions(save_detailed=True), bad_record())
    write_result(result, tmp_path / "deep" / "r.json", append=False)
    read = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert read["mean_ttft_ms"] is None
    assert read["completed"] == 0


def test_appended_results_are_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for _ in range(2):
        write_result({"a": 1}, path, append=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 1}]


def test_file_names_are_vllms_and_a_sweep_does_not_overwrite_its_own() -> None:
    started_at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def name(**options: Any) -> str:
        return str(result_path(BenchServeOptions(**options), SETTING, started_at))

    assert name() == "openai-infqps-concurrency8-tiny-20260102-030405.json"
    assert name(result_dir=Path("out"), result_filename="r.json") == "out/r.json"
    assert name(result_filename="r.json", concurrency_sweep=(1, 8)) == "r-concurrency8.json"
    assert name(result_filename="r.json", concurrency_sweep=(1, 8), append_result=True) == "r.json"
