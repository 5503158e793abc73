"""`headrace up` with the default model: what a newcomer gets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from compose.run_directory import StackRecord
from compose.temporary_stack import temporary_stack
from tests.http_client import send
from tests.stack import wait_until

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def stack() -> Iterator[StackRecord]:
    with temporary_stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: StackRecord) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key=stack.demo_key, max_retries=0, timeout=120)


def num_steps(stack: StackRecord) -> int:
    """That the engine has made."""
    exposition = send(stack.url, "GET", "/metrics").data.decode()
    [steps] = re.findall(r"^headrace_engine_steps_total\{.*\} (\S+)$", exposition, re.MULTILINE)
    return int(float(steps))


def test_it_answers_a_question_streamed_and_whole(client):
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in text


def test_a_seeded_sample_is_the_same_streamed_and_whole(client):
    options = {
        "model": MODEL,
        "prompt": "The river",
        "max_tokens": 24,
        "seed": 11,
        "temperature": 0.8,
        "top_p": 0.9,
    }
    whole = client.completions.create(**options)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert streamed == whole.choices[0].text
    assert client.completions.create(**{**options, "seed": 12}).choices[0].text != streamed


def test_a_stop_string_cut_from_the_model_s_own_words_stops_it(client):
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    for begin in range(3, len(text) - 5, 4):
        stop = text[begin : begin + 5]
        answer = client.chat.completions.create(**options, stop=stop)
        assert answer.choices[0].message.content == text[: text.find(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_a_short_request_that_comes_later_ends_first(client):
    options = {"model": MODEL, "extra_body": {"ignore_eos": True}}
    long = client.completions.create(prompt="long", max_tokens=1500, stream=True, **options)
    received, short_ended = 0, threading.Event()
    began = threading.Event()

    def read() -> None:
        nonlocal received
        for _ in long:
            received += 1
            began.set()
            if short_ended.is_set():
                break

    with long, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        assert began.wait(60)
        short = client.completions.create(prompt="short", max_tokens=5, **options)
        short_ended.set()
        reading.result(60)
    assert short.usage.completion_tokens == 5
    assert 0 < received < 1500


def test_12_requests_together_share_their_steps(client, stack):
    def run(number: int) -> None:
        prompt = f"{number}: tell me about number {number}."
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
        )

    began, before = time.monotonic(), num_steps(stack)
    for number in range(12):
        run(number)
    in_a_row, between = time.monotonic() - began, num_steps(stack)
    began = time.monotonic()
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(12, 24)))
    together = time.monotonic() - began
    print(f"in a row {in_a_row:.1f} s, together {together:.1f} s: {in_a_row / together:.1f} times as fast")
    assert between - before >= 12 * 10  # one for each token, at least: another request may just have ended
    assert num_steps(stack) - between < 12 * 10 / 2


def test_chat_and_status_work_from_a_script(stack):
    headrace = [sys.executable, "-m", "compose.cli"]
    chat = subprocess.run(
        [*headrace, "chat", "--temperature", "0", "--run-dir", stack.run_dir],
        input=QUESTION[0]["content"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Paris" in chat.stdout
    status = subprocess.run(
        [*headrace, "status", "--run-dir", stack.run_dir, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"{MODEL}-0" in json.dumps(json.loads(status.stdout))


def test_kill_9_of_the_engine_during_20_streams(client, stack):
    """Every stream ends with an error, new requests get 503, and the supervisor brings the engine back."""
    begun = threading.Barrier(21)

    def read() -> str:
        stream = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        try:
            for number, _ in enumerate(stream):
                if number == 0:
                    begun.wait(60)
        except openai.APIError as error:
            return str(error)
        return "ended as if it were complete"

    with ThreadPoolExecutor(20) as threads:
        streams = [threads.submit(read) for _ in range(20)]
        begun.wait(60)
        os.kill(stack.pids.engines[f"{MODEL}-0"], signal.SIGKILL)
        ends = [stream.result(10) for stream in streams]
    assert all("interrupted" in end for end in ends), ends

    def post() -> tuple[int, dict[str, str]]:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        answer = send(stack.url, "POST", "/v1/completions", body, key=stack.demo_key)
        return answer.status, answer.headers

    status, headers = post()
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    wait_until(lambda: post()[0] == 200, 60, "the engine is back")
