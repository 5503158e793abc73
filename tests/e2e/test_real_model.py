"""`headrace up` with the default model: what a newcomer gets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.real_stack import MODEL

NUM_STEPS = "headrace_engine_steps_total"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


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


def test_12_requests_together_share_their_steps(client, real_stack):
    def run(number: int) -> None:
        prompt = f"{number}: tell me about number {number}."
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
        )

    began, before = time.monotonic(), real_stack.count(NUM_STEPS)
    for number in range(12):
        run(number)
    in_a_row, between = time.monotonic() - began, real_stack.count(NUM_STEPS)
    began = time.monotonic()
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(12, 24)))
    together = time.monotonic() - began
    print(f"in a row {in_a_row:.1f} s, together {together:.1f} s: {in_a_row / together:.1f} times as fast")
    assert between - before >= 12 * 10  # one for each token, at least: another request may just have ended
    assert real_stack.count(NUM_STEPS) - between < 12 * 10 / 2


def test_chat_and_status_work_from_a_script(real_stack):
    run_directory = str(real_stack.run_directory)
    headrace = [sys.executable, "-m", "compose.cli"]
    chat = subprocess.run(
        [*headrace, "chat", "--temperature", "0", "--run-dir", run_directory],
        input=QUESTION[0]["content"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Paris" in chat.stdout
    status = subprocess.run(
        [*headrace, "status", "--run-dir", run_directory, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"{MODEL}-0" in json.dumps(json.loads(status.stdout))
