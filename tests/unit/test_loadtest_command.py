"""Flags of `headrace bench serve`: vLLM's spelling is understood, mistakes name the flag."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import loadtest.serve
from loadtest.options import BenchServeOptions
from loadtest.request_record import RequestRecord
from loadtest.serve import length_notes, run_bench_serve
from loadtest.serve_command import RunningStack, StackStarter, recorded_command_line, register
from loadtest.server_metrics import ServerMetrics
from loadtest.workload import build_workload
from shared.errors import ConfigError


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[BenchServeOptions]:
    """Options of the runs that a command asked for, none of which is made."""
    options: list[BenchServeOptions] = []

    def instead(given: BenchServeOptions) -> int:
        given.check()
        options.append(given)
        return 0

    monkeypatch.setattr(loadtest.serve, "run_bench_serve", instead)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return options


def call(*arguments: str, starter: StackStarter | None = None) -> Result:
    app, bench = typer.Typer(), typer.Typer()
    app.add_typer(bench, name="bench")
    register(bench, starter)
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def test_defaults_of_the_command_are_those_of_the_options(seen: list[BenchServeOptions]) -> None:
    assert call().exit_code == 0
    defaults = BenchServeOptions(command_line=seen[0].command_line)
    assert seen == [defaults]


def test_vllms_command_line_is_understood(seen: list[BenchServeOptions], tmp_path: Path) -> None:
    line = (
        "--backend openai-chat --base-url http://h:1 --model m --num-prompts 9 --request-rate 2.5 "
        "--burstiness 0.5 --max-concurrency 4 --goodput ttft:500 tpot:50 --metadata a=1 b=x=y "
        "--header K=V L=W --percentile-metrics ttft,e2el --metric-percentiles 50,99.9 "
        "--save-result --ignore-eos --temperature 0 --disable-tqdm"
    )
    result = call(*line.split(), "--result-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    options = seen[0]
    assert options.url == "http://h:1/v1/chat/completions"
    assert (options.request_rate, options.burstiness, options.max_concurrency) == (2.5, 0.5, 4)
    assert options.goodput_ms == {"ttft": 500.0, "tpot": 50.0}
    assert options.metadata == {"a": "1", "b": "x=y"}
    assert options.headers == {"K": "V", "L": "W"}
    assert options.percentile_metrics == ("ttft", "e2el")
    assert options.metric_percentiles == (50.0, 99.9)
    assert options.result_dir == tmp_path


def test_vllms_flags_for_ramps_traces_prefixes_and_sampling_are_understood(
    seen: list[BenchServeOptions], tmp_path: Path
) -> None:
    ramp = "--ramp-up-strategy exponential --ramp-up-start-rps 1 --ramp-up-end-rps 20 --num-prompts 50"
    prefixes = (
        "--dataset-name prefix_repetition --prefix-repetition-prefix-len 512 "
        "--prefix-repetition-suffix-len 8 --prefix-repetition-num-prefixes 4 "
        "--prefix-repetition-output-len 16"
    )
    sampling = "--top-p 0.9 --top-k 5 --min-p 0.1 --frequency-penalty 1 --presence-penalty 1 --logprobs 2"
    others = (
        "--tokenizer org/m --served-model-name m --trust-remote-code --ready-check-timeout-sec 9 --insecure "
        "--request-id-prefix run1- --disable-shuffle --no-oversample --skip-chat-template"
    )
    line = [*f"{ramp} {prefixes} {sampling} {others}".split(), "--extra-body", '{"seed": 4}']
    result = call(*line)
    assert result.exit_code == 0, result.output
    options = seen[0]
    assert (options.ramp_up_strategy, options.ramp_up_end_rps) == ("exponential", 20)
    assert options.prefix_repetition_num_prefixes == 4
    assert options.sampling == {
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 1.0, "presence_penalty": 1.0,
        "logprobs": 2, "seed": 4,
    }  # fmt: skip
    assert (options.tokenizer, options.served_model_name, options.ready_check_timeout_s) == ("org/m", "m", 9)
    trace = "--dataset-name timed_trace --no-self-timed --request-rate 5 --timed-trace-sec-multiplier 1"
    assert call(*trace.split(), "--dataset-path", str(tmp_path)).exit_code == 0
    assert not seen[1].is_self_timed
    assert seen[1].timed_trace_sec_multiplier == 1


def test_load_by_duration_and_answers_in_one_piece_can_be_asked_for(seen: list[BenchServeOptions]) -> None:
    line = "--duration 30 --request-rate 4 --no-streaming --num-workers 3 --trace-sample-share 0.5"
    assert call(*line.split()).exit_code == 0
    options = seen[0]
    assert (options.duration_s, options.streaming, options.num_workers) == (30, False, 3)
    assert options.num_prompts_at(None) is None
    assert options.trace_sample_share == 0.5


def test_logprobs_have_chats_own_form(seen: list[BenchServeOptions]) -> None:
    assert call("--backend", "openai-chat", "--logprobs", "3").exit_code == 0
    assert seen[0].sampling == {"logprobs": True, "top_logprobs": 3}


def test_sweep_fits_the_number_of_prompts_to_each_concurrency(seen: list[BenchServeOptions]) -> None:
    assert call("--concurrency-sweep", "1,8,32", "--request-rate", "inf").exit_code == 0
    options = seen[0]
    assert math.isinf(options.request_rate)
    assert [options.num_prompts_at(level) for level in options.concurrency_levels] == [6, 64, 64]


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("--backend vllm", "--backend"),
        ("--base-url ftp://x", "--base-url"),
        ("--dataset-name custom", "--dataset-path"),
        ("--goodput speed:1", "--goodput"),
        ("--goodput ttft=1", "--goodput"),
        ("--request-rate 0", "--request-rate"),
        ("--burstiness -1", "--burstiness"),
        ("--percentile-metrics ttft,best", "--percentile-metrics"),
        ("--metric-percentiles 101", "--metric-percentiles"),
        ("--concurrency-sweep 1,many", "--concurrency-sweep"),
        ("--concurrency-sweep 1 --max-concurrency 2", "--max-concurrency"),
        ("--random-range-ratio 1", "--random-range-ratio"),
        ("--start-stack", "--start-stack"),
        ("--dataset-name timed_trace", "--dataset-path"),
        ("--dataset-path x.json", "--dataset-path"),
        ("--self-timed", "--self-timed"),
        ("--duration 5", "--duration"),
        ("--duration 5 --request-rate 1 --num-prompts 3", "--duration"),
        ("--duration -1 --request-rate 1", "--duration"),
        ("--ramp-up-strategy steep", "--ramp-up-strategy"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 1", "--ramp-up-end-rps"),
        ("--ramp-up-start-rps 1", "--ramp-up-start-rps"),
        (
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 3",
            "--request-rate",
        ),
        ("--extra-body [1]", "--extra-body"),
        ("--extra-body {", "--extra-body"),
        ("--random-input-cv 0", "--random-input-cv"),
        ("--prefix-hit-share 1.5", "--prefix-hit-share"),
        ("--trace-time-scale nan", "--trace-time-scale"),
        ("--num-workers 0", "--num-workers"),
        ("--max-turns 1", "--max-turns"),
        ("--num-workers 100000", "--num-workers"),
        ("--endpoint foo", "--endpoint"),
        ("--base-url http://h:abc", "--base-url"),
        ("--base-url http://[::1", "--base-url"),
        ("--base-url http://h:99999", "--base-url"),
        ("--port 99999", "--port"),
        ("--base-url http://a:b@h --api-key k", "--base-url"),
        ("--base-url http://a:b@h --header authorization=x", "--base-url"),
        ("--label ../zz", "--label"),
        ("--result-filename=", "--result-filename"),
        ("--percentile-metrics ,", "--percentile-metrics"),
    ],
)
def test_wrong_value_names_its_flag_and_exits_with_2(
    seen: list[BenchServeOptions], arguments: str, flag: str
) -> None:
    result = call(*arguments.split())
    assert result.exit_code == 2
    assert f"error: {flag}" in result.output
    assert seen == []


def test_start_stack_measures_the_stack_and_stops_it(seen: list[BenchServeOptions]) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def stack() -> Iterator[RunningStack]:
        events.append("up")
        yield RunningStack("http://127.0.0.1:9", "hr-secret")
        events.append(f"down after {len(seen)}")

    assert call("--start-stack", starter=StackStarter(stack)).exit_code == 0
    assert seen[0].url == "http://127.0.0.1:9/v1/completions"
    assert seen[0].api_key == "hr-secret"
    assert events == ["up", "down after 1"]


def test_bad_options_are_refused_before_a_stack_is_started(seen: list[BenchServeOptions]) -> None:
    def never() -> contextlib.AbstractContextManager[RunningStack]:
        raise AssertionError("a stack was started for nothing")

    assert call("--start-stack", "--burstiness", "0", starter=StackStarter(never)).exit_code == 2


def test_secrets_are_struck_out_of_the_recorded_command_and_of_the_options() -> None:
    argv = ["/opt/x/headrace", "bench", "serve", "--header", "Authorization=s3", "X=s3", "--seed", "1"]
    assert recorded_command_line(argv) == "headrace bench serve --header '***' '***' --seed 1"
    assert recorded_command_line(["h", "--api-key=s3", "--port", "1"]) == "h '--api-key=***' --port 1"
    assert "s3" not in repr(BenchServeOptions(api_key="s3", headers={"Authorization": "s3"}))


def test_password_in_the_url_is_sent_as_a_header_and_shown_nowhere() -> None:
    options = BenchServeOptions(base_url="http://me:s%403@h:1/")
    options.check()
    assert options.authorization_headers == {"Authorization": "Basic bWU6c0Az"}
    assert options.url == "http://h:1/v1/completions"
    assert options.metrics_page == "http://h:1/metrics"
    metrics = ServerMetrics("http://me:s3@h:1", {"authorization": "Bearer k"})
    shown = [repr(options), metrics.url, recorded_command_line(["h", "--base-url", "http://me:s3@h:1"])]
    assert shown[2] == "h --base-url http://h:1"
    assert not [text for text in shown if "me:" in text]
    with pytest.raises(ConfigError) as raised:
        BenchServeOptions(base_url="http://me:s/3@h").check()
    assert raised.value.message == "'http://h' is not an http URL"


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"result_dir": Path("/proc/x")}, "--result-dir"),
        ({"result_filename": "."}, "--result-filename"),
        ({"result_filename": "n" * 300}, "--result-filename"),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_the_load(
    tmp_path: Path, given: dict[str, Any], flag: str
) -> None:
    options = BenchServeOptions(**{"save_result": True, "result_dir": tmp_path, "port": 9, **given})
    with pytest.raises(ConfigError) as raised:
        run_bench_serve(options)
    assert raised.value.param == flag
    assert list(tmp_path.iterdir()) == []


def test_interrupted_run_says_how_many_had_ended_and_ends_with_130(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Against a socket that takes connections and never answers; its first one brings the Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def interrupt_at_first_connection() -> None:
            connection, _ = server.accept()
            held.append(connection)
            connection.recv(1)
            os.kill(os.getpid(), signal.SIGINT)

        held: list[socket.socket] = []  # closed, it would end the request
        waiting = threading.Thread(target=interrupt_at_first_connection)
        waiting.start()
        options = BenchServeOptions(
            port=server.getsockname()[1], model="m", num_prompts=3, max_concurrency=1, scrapes_metrics=False,
            save_result=True, result_dir=tmp_path,
        )  # fmt: skip
        assert run_bench_serve(options) == 130
        waiting.join()
        held[0].close()
    assert "interrupted: 0 of 3 requests had ended; nothing was saved" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_interruption_before_the_load_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(given: BenchServeOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(loadtest.serve, "run_bench_serve", interrupted)
    result = call()
    assert result.exit_code == 130
    assert "interrupted: no load was under way" in result.output


def test_help_of_tenants_names_their_tables() -> None:
    assert "tables `tenants`" in " ".join(call("--help").output.replace("│", " ").split())


def test_building_the_command_line_imports_neither_aiohttp_nor_numpy() -> None:
    code = "import sys, loadtest.serve_command; print({'aiohttp', 'numpy', 'uvloop'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_options_are_checked_by_themselves() -> None:
    with pytest.raises(ConfigError) as raised:
        BenchServeOptions(num_prompts=0).check()
    assert raised.value.param == "--num-prompts"


@pytest.mark.parametrize(("num_tokens", "num_notes"), [(5, 0), (30, 1)])
def test_prompts_of_words_that_the_server_counts_otherwise_are_told(num_tokens: int, num_notes: int) -> None:
    options = BenchServeOptions(backend="openai-chat", random_input_len=5, random_num_turns=2)
    items = build_workload(options, 1, (1,)).items
    records = [
        RequestRecord(0, 4, 0, conversation=0, num_prompt_tokens=num_tokens),
        RequestRecord(1, 4, 0, conversation=0, turn=1, num_prompt_tokens=900),
    ]
    notes = length_notes(options, items, records)
    assert len(notes) == num_notes
    assert not notes or "30 tokens for the first turn of a conversation on average, where 5" in notes[0]
