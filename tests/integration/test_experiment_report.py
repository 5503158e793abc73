"""An experiment from the first request to the verdict, over real gateways, engines and a real Redis."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from compose.experiment.figures import ExperimentName, ExperimentStore
from compose.experiment.report import make_report
from tests.http_client import Answer, send
from tests.stack import ADMIN_TOKEN, Stack, fake_model, wait_until

NUM_USERS, NUM_ROUNDS = 240, 3
DOCUMENT: dict[str, Any] = {
    "redis": {"timeout_ms": 5000},  # a busy machine is not what these tests are about
    "models": [fake_model("quick", "step_delay_ms=10"), fake_model("slow", "step_delay_ms=20")],
    "tenants": [{"name": "t"}, {"name": "foreign"}],
    "routes": [
        {
            "name": "chat",
            "split": [
                {"variant": "control", "model": "quick"},
                {"variant": "same", "model": "quick"},
                {"variant": "slower", "model": "slow"},
            ],
        },
        *(
            {"name": name, "split": [{"variant": "a", "model": "quick"}, {"variant": "b", "model": "quick"}]}
            for name in ("scored", "looked-at")
        ),
    ],
}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, copy.deepcopy(DOCUMENT)) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


def headrace(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "compose.cli", *arguments, "--config", str(stack.directory / "headrace.json")],
        env={**os.environ, "HEADRACE_REDIS_URL": stack.redis_url},
        cwd=stack.directory,
        capture_output=True,
        text=True,
        timeout=60,
    )


def report(stack: Stack, route: str) -> dict[str, Any]:
    """As the command makes it, of what is in Redis now; {} while there is nothing."""
    figures = ExperimentStore(stack.redis, stack.keys).read(ExperimentName(route, 1))
    return {} if figures is None else msgspec.to_builtins(make_report(figures))


def num_counted(made: dict[str, Any]) -> int:
    return sum(variant["assigned"]["requests"] for variant in made.get("variants", []))


def report_of(stack: Stack, route: str, num_requests: int) -> dict[str, Any]:
    """Once so many have been written; gateways do that once a second."""

    def made() -> dict[str, Any] | None:
        found = report(stack, route)
        assert num_counted(found) <= num_requests, found
        return found if num_counted(found) == num_requests else None

    return wait_until(made, 15, f"{num_requests} requests in the figures")


async def ask_all(urls: list[str], key: str, bodies: list[dict[str, Any]], *, at_once: int = 12) -> list[int]:
    """Statuses; the gateways take turns."""
    places = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:

        async def ask(number: int, body: dict[str, Any]) -> int:
            async with (
                places,
                session.post(f"{urls[number % len(urls)]}/v1/completions", json=body) as response,
            ):
                await response.read()
                return response.status

        return await asyncio.gather(*(ask(number, body) for number, body in enumerate(bodies)))


def completion(route: str, user: str) -> dict[str, Any]:
    return {"model": route, "prompt": "hello", "max_tokens": 3, "user": user}


async def test_a_slower_variant_is_called_and_an_equal_one_is_not_over_two_gateways(
    stack: Stack, tmp_path: Path
):
    bodies = [completion("chat", f"user {user}") for _ in range(NUM_ROUNDS) for user in range(NUM_USERS)]
    assert set(await ask_all(stack.urls, stack.key("t"), bodies)) == {200}
    page = tmp_path / "report.html"
    await asyncio.to_thread(report_of, stack, "chat", len(bodies))
    told = await asyncio.to_thread(
        headrace,
        stack,
        *(["experiment", "report", "chat", "--json", "--alpha", "0.001", "--html"]),
        str(page),
    )
    made = json.loads(told.stdout)
    print(json.dumps(made["comparisons"], indent=1), *made["verdict"], sep="\n")
    called = {(one["variant"], one["metric"]) for one in made["comparisons"] if one["is_called"]}
    assert ("slower", "ttft") in called
    assert ("slower", "tpot") in called
    assert not {metric for variant, metric in called if variant == "same"}
    assert "slower is" in made["verdict"][1]
    assert "slower to the first token than control" in made["verdict"][1]
    assert "is slower" not in made["verdict"][0]
    # Each user was seen at both gateways, and is one subject.
    assert made["num_subjects"] == NUM_USERS
    assert sum(made["split"]["counted"].values()) == NUM_USERS
    assert not made["split"]["is_broken"]
    control = made["variants"][0]
    assert control["is_control"]
    assert control["times"]["ttft"]["num_values"] == control["assigned"]["outcomes"]["ok"]
    assert control["assigned"]["output_tokens"] == 3 * control["assigned"]["requests"]
    assert control["assigned"]["finish_reasons"] == {"length": control["assigned"]["requests"]}
    text = page.read_text()
    assert made["verdict"][1] in text
    assert text.count("<svg") == text.count("</svg>") >= 3
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)  # it needs no network


def test_the_metrics_of_variants_say_what_they_served(stack: Stack):
    key = stack.key("t")
    for url in stack.urls:
        send(url, "POST", "/v1/completions", completion("chat", "user 1"), key=key)
    _, body = stack.get("/metrics")
    lines = body.decode().splitlines()
    for start in (
        'headrace_variant_requests_total{outcome="ok",route="chat",variant="',
        'headrace_variant_tokens_total{direction="output",route="chat",variant="',
        'headrace_variant_time_to_first_token_seconds_count{route="chat",variant="',
        'headrace_variant_time_per_output_token_seconds_count{route="chat",variant="',
        'headrace_variant_request_duration_seconds_count{route="chat",variant="',
    ):
        assert any(line.startswith(start) and float(line.rsplit(" ", 1)[1]) > 0 for line in lines), start


def test_what_only_looks_at_tokens_is_no_part_of_an_experiment(stack: Stack):
    key, chat = stack.key("t"), {"model": "looked-at", "messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/tokenize", {"model": "looked-at", "prompt": "hi"}),
        ("/v1/chat/completions/render", chat),
        ("/v1/responses/input_tokens", {"model": "looked-at", "input": "hi"}),
        ("/v1/messages/count_tokens", chat),
        ("/v1/completions", completion("looked-at", "user")),
    ):
        assert send(stack.url, "POST", path, body, key=key).status == 200
    # Nor if it is refused: neither these nor those of above come before the completion in the figures.
    for path, body in (
        ("/v1/chat/completions/render", {**chat, "max_tokens": 10**6}),
        ("/v1/completions/render", {"model": "looked-at", "prompt": "hi", "max_tokens": 10**6}),
        (
            "/v1/responses/input_tokens",
            {"model": "looked-at", "input": "x", "previous_response_id": "resp_1"},
        ),
    ):
        assert send(stack.url, "POST", path, body, key=key).status == 400
    send(stack.url, "POST", "/v1/completions", completion("looked-at", "user"), key=key)
    report_of(stack, "looked-at", 2)


async def test_requests_that_run_while_their_route_changes_count_for_the_split_they_were_drawn_from(
    stack: Stack,
):
    def arms(**weights: float) -> dict[str, Any]:
        arms = [{"variant": name, "model": "slow", "weight": weight} for name, weight in weights.items()]
        return {"split": arms}

    async def admin(method: str, body: Any = None) -> None:
        path = "/admin/routes/swung"
        answer = await asyncio.to_thread(send, stack.url, method, path, body, key=ADMIN_TOKEN)
        assert answer.status < 300, answer.data

    key, num_users = stack.key("t"), 40
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:

        async def ask(user: int) -> str:
            body = {**completion("swung", f"user {user}"), "max_tokens": 100}
            async with session.post(f"{stack.url}/v1/completions", json=body) as response:
                assert response.status == 200
                return (await response.json())["id"]

        await admin("PUT", arms(a=1, b=1))
        asked = [asyncio.create_task(ask(user)) for user in range(num_users)]
        await asyncio.to_thread(
            wait_until, lambda: num_running(stack, "slow") == num_users, 15, "all of them"
        )
        await admin("PUT", arms(a=99, renamed=1))
        await admin("PUT", {**arms(a=99, c=1), "version": 2})
        await admin("DELETE")
        assert not any(task.done() for task in asked)
        *_, response_id = await asyncio.gather(*asked)
    made = await asyncio.to_thread(report_of, stack, "swung", num_users)
    assert made["split"]["expected"] == pytest.approx({"a": num_users / 2, "b": num_users / 2})
    assert sum(made["split"]["counted"].values()) == num_users
    assert not made["split"]["is_broken"]
    assert (await asyncio.to_thread(feedback, stack.url, key, response_id, 1)).status == 200


def num_running(stack: Stack, model: str) -> int:
    engines = stack.admin_status()["engines"]
    return sum(engine["in_flight"] for engine in engines if engine["model"] == model)


def test_experiments_are_listed_and_others_are_not_known(stack: Stack):
    send(stack.url, "POST", "/v1/completions", completion("scored", "u"), key=stack.key("t"))
    wait_until(lambda: report(stack, "scored"), 15, "figures")
    listed = headrace(stack, "experiment", "list").stdout
    assert "scored" in listed
    unknown = headrace(stack, "experiment", "report", "quick")
    assert unknown.returncode == 2
    assert "there are no figures of 'quick'" in unknown.stderr
    assert headrace(stack, "experiment", "report", "scored", "--version", "9").returncode == 2
    assert "there are: ttft" in headrace(stack, "experiment", "report", "scored", "--metric", "x").stderr


# ------------------------------------------------------------------------------------------ feedback


def feedback(url: str, key: str | None, response_id: str, score: Any, **fields: Any) -> Answer:
    body = {"response_id": response_id, "score": score, **fields}
    return send(url, "POST", "/v1/feedback", body, key=key)


def feedback_in_report(stack: Stack) -> dict[str, tuple[int, float | None]]:
    variants = report(stack, "scored")["variants"]
    return {one["variant"]: (one["num_feedback"], (one["feedback"] or {}).get("value")) for one in variants}


def test_feedback_counts_for_the_variant_of_the_answer_and_a_later_score_replaces_the_earlier_one(
    stack: Stack,
):
    key, (first, second) = stack.key("t"), stack.urls
    scores: dict[str, list[float]] = {"a": [], "b": []}
    for number in range(24):
        answer = send(first, "POST", "/v1/completions", completion("scored", f"scorer {number}"), key=key)
        response_id, variant = answer.json["id"], answer.headers["x-headrace-variant"]
        score = 1 if variant == "a" else -0.25
        # At another gateway, at once: the first one may not have written whose answer it is.
        assert feedback(second if number < 3 else first, key, response_id, -1).status == 200
        told = feedback(first, key, response_id, score, comment="fine <b>")
        assert told.json == {"object": "feedback", "response_id": response_id, "score": score}
        assert feedback(first, key, response_id, score, comment="fine <b>").status == 200  # sent again
        scores[variant].append(score)
    assert all(len(given) >= 2 for given in scores.values())
    wait_until(lambda: num_counted(report(stack, "scored")) >= 24, 15, "the requests")
    assert feedback_in_report(stack) == {
        "a": (len(scores["a"]), pytest.approx(1)),
        "b": (len(scores["b"]), pytest.approx(-0.25)),
    }
    comments = report(stack, "scored")["comments"]
    assert len(comments) == 24
    assert {one["comment"] for one in comments} == {"fine <b>"}
    page = stack.directory / "feedback.html"
    headrace(stack, "experiment", "report", "scored", "--html", str(page))
    assert "fine &lt;b&gt;" in page.read_text()
    assert "fine <b>" not in page.read_text()
    nowhere = headrace(stack, "experiment", "report", "scored", "--html", str(stack.directory))
    assert (nowhere.returncode, "Traceback" in nowhere.stderr) == (2, False)
    assert f"cannot write {stack.directory}" in nowhere.stderr


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ],
)
def test_answers_of_every_interface_can_be_scored(stack: Stack, path: str, body: dict[str, Any]):
    key = stack.key("t")
    answer = send(stack.url, "POST", path, {"model": "scored", **body}, key=key)
    assert answer.status == 200, answer.data
    assert feedback(stack.url, key, answer.json["id"], 0.5).status == 200


def test_a_foreign_or_unknown_answer_and_one_of_no_experiment_are_not_found(stack: Stack):
    key = stack.key("t")
    answer = send(stack.url, "POST", "/v1/completions", completion("scored", "u"), key=key).json
    lonely = send(stack.url, "POST", "/v1/completions", completion("quick", "u"), key=key).json
    assert feedback(stack.url, key, answer["id"], 1).status == 200
    for its_key, response_id in (
        (stack.key("foreign"), answer["id"]),
        (key, "cmpl-unknown"),
        (key, f"cmpl-{0:024x}"),
        (key, lonely["id"]),
        (key, "}:cmpl-*\r\n"),
    ):
        refused = feedback(stack.url, its_key, response_id, 1)
        assert refused.status == 404
        assert refused.error["code"] == "response_not_found"
        assert refused.error["param"] == "response_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"score": 1.5}, "score"),
        ({"score": "1"}, "score"),
        ({"score": True}, "score"),
        ({"score": None}, "score"),
        ({"score": 1, "response_id": ""}, "response_id"),
        ({"score": 1, "response_id": "x" * 129}, "response_id"),
        ({"score": 1, "comment": "x" * 513}, "comment"),
        ({"score": 1, "stars": 5}, "stars"),
    ],
)
def test_feedback_that_is_wrong_is_refused_by_its_field(stack: Stack, fields: dict[str, Any], param: str):
    refused = send(stack.url, "POST", "/v1/feedback", {"response_id": "x", **fields}, key=stack.key("t"))
    assert refused.status == 400
    assert refused.error["param"] == param


def test_feedback_needs_a_key(stack: Stack):
    assert feedback(stack.url, None, "x", 1).status == 401


# ------------------------------------------------------------------------------------------ Redis in trouble


async def test_a_frozen_redis_loses_no_request_and_counts_none_twice(
    own_redis: tuple[str, subprocess.Popen[bytes]],
):
    """What is sent to it while it is frozen times out, and is carried out all the same when it goes on."""
    redis_url, process = own_redis
    document = {
        **DOCUMENT,
        "redis": {"timeout_ms": 500},
        "models": [fake_model("quick"), fake_model("slow")],
    }
    with Stack(redis_url, document) as stack:
        key = stack.key("t")
        bodies = [completion("scored", f"user {user}") for user in range(30)]
        others = [completion("scored", f"other user {user}") for user in range(30)]

        async def num_answered(bodies: list[dict[str, Any]]) -> int:
            """On a busy machine Redis may be too slow to tell whose key it is."""
            statuses = await ask_all(stack.urls, key, bodies)
            assert set(statuses) <= {200, 503}
            return statuses.count(200)

        before = await num_answered(bodies)
        await asyncio.to_thread(report_of, stack, "scored", before)
        process.send_signal(signal.SIGSTOP)
        meanwhile = 0
        began = time.monotonic()
        while time.monotonic() - began < 4:  # some writes are tried, and time out
            meanwhile += await num_answered(bodies[:5])
            await asyncio.sleep(0.5)
        meanwhile += await num_answered(others)
        assert meanwhile > 0
        process.send_signal(signal.SIGCONT)
        after = await num_answered(bodies[:1])
        made = await asyncio.to_thread(report_of, stack, "scored", before + meanwhile + after)
        assert made["num_subjects"] <= 60
        assert sum(made["split"]["counted"].values()) <= 60


def test_a_gateway_that_ends_writes_what_it_has_counted(stack: Stack):
    before = num_counted(report(stack, "scored"))
    url = stack.start_gateway("third")
    try:
        wait_until(lambda: stack.get("/readyz")[0] == 200, what="the third gateway's readiness")
        answer = send(url, "POST", "/v1/completions", completion("scored", "last"), key=stack.key("t"))
        assert answer.status == 200
        stack.kill("third", signal.SIGTERM)
        assert stack.processes["third"].wait(15) == 0
        assert num_counted(report(stack, "scored")) == before + 1
    finally:
        stack.urls.remove(url)
        stack.url = stack.urls[0]
