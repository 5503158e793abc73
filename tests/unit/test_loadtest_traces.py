"""Traces: every format read, times kept, equal block hashes become equal tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.options import BenchServeOptions
from loadtest.traces.replay import ReplaySettings, replay_trace
from loadtest.traces.trace_file import TraceForm, read_trace
from loadtest.traces.trace_request import TraceRequest
from loadtest.workload import build_workload
from shared.errors import ConfigError

MOONCAKE = """
{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 4]}
{"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 3]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
USAGE_ROWS = [
    {"arrived_at": 1700000001.5, "tenant": "b", "input_tokens": 40, "output_tokens": 4, "cached_tokens": 16},
    {"arrived_at": 1700000000.0, "tenant": "a", "input_tokens": 30, "output_tokens": 3, "cached_tokens": 0},
    {"arrived_at": 1700000000.2, "tenant": "a", "input_tokens": 30, "output_tokens": 3, "is_shadow": True},
    {"arrived_at": 1700000000.3, "tenant": "a", "input_tokens": 0, "output_tokens": 0, "outcome": "refused"},
]


def read(tmp_path: Path, name: str, text: str, form: TraceForm | None = None) -> list[TraceRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path, name, form)


def test_mooncake_lines_are_sorted_by_time_with_their_hashes(tmp_path: Path) -> None:
    assert read(tmp_path, "timed_trace", MOONCAKE) == [
        TraceRequest(0.0, 1030, 7, (1, 2, 3)),
        TraceRequest(3.0, 1100, 5, (1, 2, 4)),
    ]


def test_labels_and_unit_of_a_timed_trace_can_be_named(tmp_path: Path) -> None:
    form = TraceForm(1.0, "t", "in", "out", "blocks")
    trace = read(tmp_path, "timed_trace", '{"t": 2, "in": 9, "out": 1, "blocks": [7]}', form)
    assert trace == [TraceRequest(2.0, 9, 1, (7,))]


def test_azure_times_are_read_with_seven_digits_and_with_offsets(tmp_path: Path) -> None:
    first, second = read(tmp_path, "azure", AZURE)
    assert second.at_s - first.at_s == pytest.approx(0.052)
    assert (first.num_input_tokens, second.num_output_tokens) == (4808, 27)
    assert read(tmp_path, "azure", AZURE_2024)[0].at_s == pytest.approx(1715299200.00993)


def test_burstgpt_requests_without_an_answer_are_left_out(tmp_path: Path) -> None:
    trace = read(tmp_path, "burstgpt", BURSTGPT)
    assert [(one.at_s, one.num_input_tokens) for one in trace] == [(5.0, 472), (118.0, 417)]


def csv_of(rows: list[dict[str, Any]]) -> str:
    names = sorted({name for row in rows for name in row})
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [json.dumps(USAGE_ROWS, indent=2), "\n".join(map(json.dumps, USAGE_ROWS)), csv_of(USAGE_ROWS)],
    ids=["json", "json lines", "csv"],
)
def test_usage_rows_are_read_in_every_form_without_shadows_and_refusals(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, "usage", text) == [
        TraceRequest(1700000000.0, 30, 3, tenant="a"),
        TraceRequest(1700000001.5, 40, 4, num_shared_tokens=16, tenant="b"),
    ]


def span(span_id: str, parent: str, begin_s: int, **attributes: Any) -> dict[str, Any]:
    listed = [
        {"key": name, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for name, value in attributes.items()
    ]
    return {
        "spanId": span_id,
        "parentSpanId": parent,
        "startTimeUnixNano": str(begin_s * 10**9),
        "attributes": listed,
    }


@pytest.mark.parametrize("in_lines", [False, True])
def test_spans_count_a_request_once_though_gateway_and_engine_both_tell_it(
    tmp_path: Path, in_lines: bool
) -> None:
    counts = {"gen_ai.usage.input_tokens": 50, "gen_ai.usage.output_tokens": 6}
    spans = [
        span("http", "", 10),
        span("chat", "http", 11, **counts, **{"headrace.tenant": "acme"}),
        span("queue", "chat", 12),
        span("engine", "queue", 13, **counts),
        span(
            "other", "elsewhere", 20, **{"gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.completion_tokens": 2}
        ),
    ]
    documents = [{"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]} for one in spans]
    one_document = {"resourceSpans": [part for document in documents for part in document["resourceSpans"]]}
    text = "\n".join(map(json.dumps, documents)) if in_lines else json.dumps(one_document, indent=1)
    assert read(tmp_path, "otel", text) == [
        TraceRequest(11.0, 50, 6, tenant="acme"),
        TraceRequest(20.0, 9, 2),
    ]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("timed_trace", '{"timestamp": 1}\n', "line 1: 'input_length' is None"),
        (
            "timed_trace",
            '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [0.5]}',
            "line 1",
        ),
        ("timed_trace", "[1]", "line 1 is not an object"),
        ("timed_trace", "\n", "holds no requests"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
            "line 2: 'TIMESTAMP' is 'yesterday'",
        ),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\nnan,1,1\n", "line 2: 'Timestamp' is 'nan'"),
        ("usage", '[{"arrived_at": null}]', "entry 1: 'arrived_at'"),
        ("otel", "{", "not JSON"),
    ],
)
def test_what_cannot_be_read_names_its_place(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("[", "\\[")) as raised:
        read(tmp_path, name, text)
    assert raised.value.param == "--dataset-path"


SETTINGS = ReplaySettings(takes_ids=True, block_size=4)


def test_equal_hashes_become_equal_tokens_and_others_do_not() -> None:
    trace = [
        TraceRequest(0.0, 10, 1, (1, 2, 3)),
        TraceRequest(1.0, 12, 1, (1, 2, 4)),
        TraceRequest(2.0, 8, 1, (5, 2)),
    ]
    replay = replay_trace(trace, SETTINGS, None, nonce=[1])
    first, second, third = (prompt.content for prompt in replay.prompts)
    assert [len(prompt.content) for prompt in replay.prompts] == [10, 12, 8]
    assert first[:8] == second[:8]
    assert first[8:10] != second[8:10]
    assert third[:4] != first[:4]
    assert replay.prefix_hit_share == pytest.approx(8 / 30)  # the block behind another one is no hit
    again = replay_trace(trace, SETTINGS, None, nonce=[1])
    other = replay_trace(trace, SETTINGS, None, nonce=[2])
    assert again.prompts == replay.prompts
    assert other.prompts[0].content[:4] != first[:4]


def test_times_are_scaled_from_where_the_replay_begins() -> None:
    trace = [TraceRequest(100.0 + second, 4, 1) for second in range(10)]
    replay = replay_trace(trace, SETTINGS, 4, nonce=[1])
    assert replay.offsets_ns == [0, 10**9, 2 * 10**9, 3 * 10**9]
    part = ReplaySettings(takes_ids=True, time_scale=0.5, start_s=2.5, duration_s=1.2)
    assert replay_trace(trace, part, None, nonce=[1]).offsets_ns == [0, 5 * 10**8, 10**9]


def test_cached_tokens_of_usage_rows_become_a_beginning_that_the_tenant_shares() -> None:
    trace = [
        TraceRequest(0.0, 20, 1, num_shared_tokens=6, tenant="a"),
        TraceRequest(1.0, 20, 1, num_shared_tokens=15, tenant="a"),
        TraceRequest(2.0, 20, 1, num_shared_tokens=15, tenant="b"),
        TraceRequest(3.0, 20, 1, num_shared_tokens=9, tenant="a"),
    ]
    replay = replay_trace(trace, SETTINGS, None, nonce=[3])
    first, second, third, fourth = (prompt.content for prompt in replay.prompts)
    assert first[:6] == second[:6]
    assert fourth[:9] == second[:9]
    assert third[:6] != first[:6]
    assert first[6:12] != second[6:12]
    assert replay.prefix_hit_share == pytest.approx((6 + 9) / 80)
    assert [prompt.tenant for prompt in replay.prompts] == ["a", "a", "b", "a"]


def test_chat_is_replayed_in_words_and_long_requests_can_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    options = BenchServeOptions(
        backend="openai-chat",
        dataset_name="timed_trace",
        dataset_path=path,
        max_input_len=600,
        max_output_len=6,
        trace_time_scale=0.1,
    )
    workload = build_workload(options, None, (1,))
    words = [str(item.content).split() for item in workload.items]
    assert [len(text) for text in words] == [600, 600]
    assert words[0] == words[1]  # both are hashes 1 and 2
    assert [item.num_output_tokens for item in workload.items] == [6, 5]
    assert workload.offsets_ns == [0, 3 * 10**8]
    assert not options.self_timed
    assert options.is_self_timed


def otlp(*attributes: Any, start: Any = "1700000000000000000") -> str:
    span = {"spanId": "a", "startTimeUnixNano": start, "attributes": list(attributes)}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


def attribute(name: str, value: Any) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value}}


COUNTS = (attribute("gen_ai.usage.input_tokens", "3"), attribute("gen_ai.usage.output_tokens", "2"))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("otel", otlp(COUNTS[0], attribute("gen_ai.usage.output_tokens", "abc")), "span 1"),
        ("otel", otlp({"key": "x", "value": "y"}), "span 1, attribute 1"),
        ("otel", otlp(5), "span 1, attribute 1"),
        ("otel", '{"resourceSpans": [{"scopeSpans": [{"spans": [5]}]}]}', "span 1"),
        ("otel", otlp(*COUNTS, start="noon"), "span 1"),
        ("otel", otlp(*COUNTS, attribute("headrace.cached_tokens", "x")), "span 1"),
        ("azure", AZURE + "2023-11-16 18:17:04," + "7" * 140_000 + ",3\n", "line 4"),
        ("timed_trace", '{"timestamp": ' + "7" * 5_000 + "}", "line 1"),
        ("timed_trace", '{"timestamp": ' + "7" * 400 + "}", "line 1"),
        ("timed_trace", "[" * 100_000, "line 1"),
        ("otel", "[" * 100_000, "line 1"),
        ("timed_trace", '{"timestamp": 0, "input_length": 1e18, "output_length": 1}', "line 1"),
    ],
)
def test_wrong_types_and_sizes_name_the_file_and_the_place(
    tmp_path: Path, name: str, text: str, place: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, name, text)
    assert f"{tmp_path / 'trace'}: " in raised.value.message
    assert place in raised.value.message
    assert len(raised.value.message) < 400


def test_spans_with_counts_as_text_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, "otel", otlp(*COUNTS))
    assert found == [TraceRequest(1_700_000_000.0, 3, 2)]


def test_requests_that_are_left_out_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(BURSTGPT)
    notes: list[str] = []
    assert len(read_trace(path, "burstgpt", notes=notes)) == 2
    assert len(notes) == 1
    assert "1 of 3 requests are left out" in notes[0]
