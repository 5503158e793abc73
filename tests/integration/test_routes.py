"""What routes do with requests: assignment, overrides, fallback, shadow traffic, and what variants add."""

from __future__ import annotations

import http.client
import json
import re
import signal
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from shared.usage import UsageRecord
from tests.http_client import Answer, send
from tests.stack import Stack, fake_model, wait_until


def arm(variant: str, model: str, **fields: Any) -> dict[str, Any]:
    return {"variant": variant, "model": model, **fields}


def shadowed(name: str, model: str, **shadow: Any) -> dict[str, Any]:
    """A route that `main` answers, of whose requests `dark` sees copies."""
    return {
        "name": name,
        "split": [arm("main", "a"), arm("dark", model, weight=0)],
        "shadow": {"variant": "dark", "percent": 100, **shadow},
    }


def guarded(name: str, *models: str) -> dict[str, Any]:
    """A route whose variants, called after their models, stand in for one another in this order."""
    arms = [arm(model, model, weight=int(index == 0)) for index, model in enumerate(models)]
    return {"name": name, "split": arms, "fallback": list(models)}


DOCUMENT: dict[str, Any] = {
    "models": [
        fake_model("a"),
        fake_model("b", "step_delay_ms=20"),
        fake_model("short", max_model_len=64),
        fake_model("stuck", "step_delay_ms=60000"),
        fake_model("narrow", "step_delay_ms=50", max_num_seqs=1, max_queued_requests=1),
        fake_model("dying", "die_at_step=1"),
        fake_model("none", engines=0),
        fake_model("none-too", engines=0),
        fake_model("vectors", runner="pooling"),
    ],
    "tenants": [{"name": "free"}, {"name": "chosen"}, {"name": "single", "max_concurrency": 1}],
    "routes": [
        {"name": "ab", "split": [arm("control", "a", weight=50), arm("treated", "b", weight=50)]},
        {
            "name": "overridden",
            "split": [arm("control", "a"), arm("treated", "b", weight=0)],
            "overrides": [{"tenant": "chosen", "variant": "treated"}],
            "allow_variant_header": True,
        },
        {
            "name": "styled",
            "split": [
                arm(
                    "brief",
                    "a",
                    system_prompt="Be brief.",
                    sampling={"temperature": 0.25, "top_p": 0.5, "seed": 7, "max_tokens": 9},
                )
            ],
        },
        {"name": "tight", "split": [arm("short", "short", sampling={"max_tokens": 4000})]},
        guarded("guarded", "none", "a"),
        guarded("thrice", "none", "none-too", "b"),
        guarded("hopeless", "none", "none-too"),
        guarded("unfit", "none", "short", "a"),
        guarded("unfit-only", "narrow", "short"),
        guarded("crowded", "narrow", "a"),
        guarded("deadly", "dying", "a"),
        guarded("stuck-guarded", "stuck", "a"),
        guarded("late", "b", "a"),
        shadowed("shadowed", "b"),
        shadowed("shadowed-slow", "b", max_in_flight=1),
        shadowed("shadowed-narrow", "narrow"),
        shadowed("shadowed-short", "short"),
        shadowed("shadowed-none", "none"),
        {
            "name": "shadowed-vectors",
            "split": [arm("main", "vectors"), arm("dark", "vectors", weight=0)],
            "shadow": {"variant": "dark", "percent": 100},
        },
    ],
}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, DOCUMENT) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key("free")


def complete(
    stack: Stack, key: str, model: str, *, url: str = "", headers: Any = None, **fields: Any
) -> Answer:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "seed": 1, **fields}
    return send(url or stack.url, "POST", "/v1/completions", body, key=key, headers=headers)


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}


def counted(stack: Stack, name: str, **labels: str) -> int:
    """A counter of the gateway that is asked; 0 if there is no such series."""
    text = stack.get("/metrics")[1].decode()
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}_total\{{(.*)\}} (\S+)", line)
        if match and dict(re.findall(r'(\w+)="(.*?)"', match[1])) == labels:
            return int(float(match[2]))
    return 0


def copies(stack: Stack, route: str) -> dict[str, int]:
    outcomes = ("attempted", "succeeded", "failed", "dropped")
    return {
        outcome: number
        for outcome in outcomes
        if (
            number := counted(stack, "headrace_shadow_requests", route=route, variant="dark", outcome=outcome)
        )
    }


# ---------------------------------------------------------------------- who answers


def test_two_gateways_assign_every_user_to_the_same_variant(stack: Stack, key: str):
    def variants(url: str) -> list[str]:
        answers = [
            complete(stack, key, "ab", url=url, user=f"user {number}", max_tokens=1) for number in range(60)
        ]
        assert {answer.headers["x-headrace-subject"] for answer in answers} == {"user"}
        return [answer.headers["x-headrace-variant"] for answer in answers]

    first, second = (variants(url) for url in stack.urls)
    assert first == second
    assert set(first) == {"control", "treated"}


def test_where_no_user_is_named_the_key_is_the_subject_and_that_is_told(stack: Stack, key: str):
    answers = [complete(stack, key, "ab") for _ in range(5)]
    assert len({answer.headers["x-headrace-variant"] for answer in answers}) == 1
    assert {answer.headers["x-headrace-subject"] for answer in answers} == {"key"}
    assert complete(stack, key, "a").headers["x-headrace-subject"] == "none"


def test_a_tenant_or_a_client_overrides_the_split_and_the_answer_says_so(stack: Stack, key: str):
    for answer in (
        complete(stack, stack.key("chosen"), "overridden"),
        complete(stack, key, "overridden", headers={"x-headrace-variant": "treated"}),
    ):
        assert answer.status == 200
        assert answer.headers["x-headrace-variant"] == "treated"
        assert answer.headers["x-headrace-assigned-variant"] == "control"
        assert answer.headers["x-headrace-subject"] == "override"
    plain = complete(stack, key, "overridden")
    assert plain.headers["x-headrace-variant"] == "control"
    assert "x-headrace-assigned-variant" not in plain.headers


def test_a_wished_variant_that_does_not_exist_is_refused_and_where_none_may_be_wished_it_is_ignored(
    stack: Stack, key: str
):
    wish = {"x-headrace-variant": "x"}
    refused = complete(stack, key, "overridden", headers=wish)
    assert (refused.status, refused.error["param"]) == (400, "x-headrace-variant")
    assert complete(stack, key, "guarded", headers=wish).status == 200


# ---------------------------------------------------------------------- what variants add


def test_the_system_prompt_and_the_sampling_of_a_variant_reach_the_engine(stack: Stack, key: str):
    def rendered(**fields: Any) -> dict[str, Any]:
        path = "/v1/chat/completions/render"
        return send(stack.url, "POST", path, chat("styled", **fields), key=key).json

    plain = rendered()
    assert plain["prompt"].startswith("<|system|>Be brief.<|end|><|user|>hello<|end|>")
    sampling = plain["sampling_params"]
    assert {name: sampling[name] for name in ("temperature", "top_p", "seed", "max_tokens")} == {
        "temperature": 0.25,
        "top_p": 0.5,
        "seed": 7,
        "max_tokens": 9,
    }
    own = rendered(temperature=1.5, max_completion_tokens=3)["sampling_params"]
    assert (own["temperature"], own["top_p"], own["max_tokens"]) == (1.5, 0.5, 3)


def test_all_endpoints_that_chat_have_the_variants_prompt(stack: Stack, key: str):
    def post(path: str, body: dict[str, Any]) -> Any:
        answer = send(stack.url, "POST", path, body, key=key)
        assert answer.status == 200, answer.data
        return answer.json

    num_tokens = post("/tokenize", chat("styled"))["count"]
    assert num_tokens == post("/tokenize", chat("a"))["count"] + len("Be brief.") + 2  # the markers
    answered = post("/v1/chat/completions", chat("styled"))
    assert answered["usage"]["prompt_tokens"] == num_tokens
    assert answered["usage"]["completion_tokens"] == 9
    response = post("/v1/responses", {"model": "styled", "input": "hello"})
    assert response["usage"]["input_tokens"] == num_tokens
    assert (response["temperature"], response["top_p"]) == (0.25, 0.5)
    assert (
        post("/v1/responses/input_tokens", {"model": "styled", "input": "hello"})["input_tokens"]
        == num_tokens
    )
    message = post("/v1/messages", chat("styled", max_tokens=2))
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    assert post("/v1/messages/count_tokens", chat("styled"))["input_tokens"] == num_tokens


def test_answers_are_those_of_a_client_that_had_asked_for_it_itself(stack: Stack, key: str):
    by_variant = send(stack.url, "POST", "/v1/chat/completions", chat("styled"), key=key).json
    asked = {"temperature": 0.25, "top_p": 0.5, "seed": 7, "max_tokens": 9}
    system = {"role": "system", "content": "Be brief."}
    body = {"model": "a", "messages": [system, {"role": "user", "content": "hello"}], **asked}
    by_client = send(stack.url, "POST", "/v1/chat/completions", body, key=key).json
    assert by_variant["choices"] == by_client["choices"]


def test_a_default_length_gives_way_to_the_prompt(stack: Stack, key: str):
    answer = complete(stack, key, "tight", max_tokens=None)
    assert answer.status == 200
    assert answer.json["usage"]["total_tokens"] == 64


# ---------------------------------------------------------------------- fallback


def test_another_variant_answers_for_one_without_an_engine_and_both_are_told(stack: Stack, key: str):
    before = counted(stack, "headrace_fallbacks", route="guarded", **{"from": "none", "to": "a"})
    answer = complete(stack, key, "guarded")
    assert answer.status == 200
    assert answer.headers["x-headrace-variant"] == "a"
    assert answer.headers["x-headrace-assigned-variant"] == "none"
    assert answer.headers["x-headrace-fallback"] == "none"
    after = counted(stack, "headrace_fallbacks", route="guarded", **{"from": "none", "to": "a"})
    assert after == before + 1
    assert complete(stack, key, "thrice").headers["x-headrace-fallback"] == "none,none-too"


def test_when_all_fail_the_last_cause_is_told_with_the_chain(stack: Stack, key: str):
    answer = complete(stack, key, "hopeless")
    assert (answer.status, answer.error["code"]) == (503, "unavailable")
    assert answer.headers["x-headrace-fallback"] == "none,none-too"
    assert "retry-after" in answer.headers


def test_what_is_the_clients_own_fault_is_refused_by_the_variant_that_it_was_meant_for(
    stack: Stack, key: str
):
    answer = complete(stack, key, "crowded", prompt="x" * 5000)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "x-headrace-fallback" not in answer.headers


def test_a_full_queue_sends_the_request_to_another_variant(stack: Stack, key: str):
    with Occupied(stack, key, "narrow", 2):
        answer = complete(stack, key, "crowded")
        assert answer.status == 200
        assert answer.headers["x-headrace-variant"] == "a"
        # A variant that cannot do what the other one could is passed over, and is not what is told.
        refused = complete(stack, key, "unfit-only", prompt="x" * 200)
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert refused.headers["x-headrace-fallback"] == "narrow,short"


def test_a_stand_in_that_cannot_hold_the_prompt_is_passed_over(stack: Stack, key: str):
    assert complete(stack, key, "unfit", prompt="x" * 200).headers["x-headrace-variant"] == "a"
    assert complete(stack, key, "unfit").headers["x-headrace-variant"] == "short"


def test_a_request_whose_step_ended_an_engine_is_not_handed_on_to_the_next_model(stack: Stack, key: str):
    answer = complete(stack, key, "deadly")
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert "x-headrace-fallback" not in answer.headers


# ---------------------------------------------------------------------- shadow traffic


def test_a_shadow_sees_every_endpoint_and_no_answer_is_changed_by_it(stack: Stack, key: str):
    requests = [
        ("/v1/chat/completions", chat("", seed=3, max_tokens=5)),
        ("/v1/chat/completions", chat("", seed=3, max_tokens=1, stream=True)),  # more may be merged
        ("/v1/completions", {"model": "", "prompt": ["x", "y"], "seed": 3, "max_tokens": 5, "n": 2}),
        ("/v1/messages", chat("", max_tokens=5, temperature=0)),
        ("/v1/responses", {"model": "", "input": "x", "seed": 3, "max_output_tokens": 5}),
    ]
    for number, (path, body) in enumerate(requests, 1):
        _, with_shadow, without = (  # the first one, so that both have the prompt in the same cache
            send(stack.url, "POST", path, {**body, "model": model}, key=key)
            for model in ("a", "shadowed", "a")
        )
        assert without_names(with_shadow.data, "shadowed") == without_names(without.data, "a")
        wait_until(
            lambda number=number: copies(stack, "shadowed") == {"attempted": number, "succeeded": number},
            what=f"the copy for {path}",
        )


def test_a_copy_has_a_row_of_its_own_among_the_records_which_says_that_nobody_pays_for_it(
    stack: Stack, key: str
):
    answer = complete(stack, key, "shadowed", headers={"x-request-id": "copied"}, max_tokens=3)
    assert answer.status == 200

    def rows() -> list[UsageRecord]:
        found = stack.redis.xrange(stack.keys.usage)
        records = [msgspec.json.decode(fields[b"row"], type=UsageRecord) for _, fields in found]
        return sorted((row for row in records if row.request_id == "copied"), key=lambda row: row.is_shadow)

    paid, shadow = wait_until(lambda: rows() if len(rows()) == 2 else None, what="both rows")
    assert [(row.is_shadow, row.variant, row.model) for row in (paid, shadow)] == [
        (False, "main", "a"),
        (True, "dark", "b"),
    ]
    for row in (paid, shadow):
        assert (row.tenant, row.outcome, row.input_tokens, row.output_tokens) == ("free", "ok", 5, 3)
        assert row.time_to_first_token_s is not None
        assert row.finish_reasons == ["length"]


def test_vectors_have_a_shadow_too(stack: Stack, key: str):
    body = {"model": "shadowed-vectors", "input": ["one", "two"]}
    shadowed = send(stack.url, "POST", "/v1/embeddings", body, key=key)
    plain = send(stack.url, "POST", "/v1/embeddings", {**body, "model": "vectors"}, key=key)
    assert shadowed.json["data"] == plain.json["data"]
    done = {"attempted": 1, "succeeded": 1}
    wait_until(lambda: copies(stack, "shadowed-vectors") == done, what="the copy")


def test_a_slow_shadow_is_not_waited_for_holds_no_slot_and_drops_what_is_too_much(stack: Stack):
    """Its copies take four seconds each, of which one may run at a time."""
    key = stack.key("single")  # one request at a time
    for _ in range(3):
        answer = complete(stack, key, "shadowed-slow", max_tokens=200)
        assert answer.status == 200
        assert answer.headers["x-headrace-variant"] == "main"
    # All three were answered while the first copy still runs.
    assert copies(stack, "shadowed-slow") == {"attempted": 1, "dropped": 2}
    assert in_flight(stack, "b") == 1


def test_a_shadow_with_a_queue_gets_no_copies(stack: Stack, key: str):
    with Occupied(stack, key, "narrow", 2):
        wait_until(lambda: engine_of(stack, "narrow")["load"]["num_waiting"] == 1, what="a queue")
        assert complete(stack, key, "shadowed-narrow").status == 200
        assert copies(stack, "shadowed-narrow") == {"dropped": 1}


def test_a_shadow_that_fails_or_has_no_engine_harms_nobody(stack: Stack, key: str):
    prompt = "x" * 100  # too long for one of them
    plain = complete(stack, key, "a", prompt=prompt).json["choices"]
    for route, outcomes in (
        ("shadowed-none", {"dropped": 1}),
        ("shadowed-short", {"attempted": 1, "failed": 1}),
    ):
        answer = complete(stack, key, route, prompt=prompt)
        assert (answer.status, answer.json["choices"]) == (200, plain)
        wait_until(lambda route=route, outcomes=outcomes: copies(stack, route) == outcomes, what=route)


# ---------------------------------------------------------------------- what ends meanwhile; in this order


def test_requests_whose_engine_is_killed_before_the_first_byte_are_answered_by_another_model(
    stack: Stack, key: str
):
    response = {"model": "stuck-guarded", "input": "x", "max_output_tokens": 3}
    bodies = [
        ("/v1/completions", {"model": "stuck-guarded", "prompt": "x", "max_tokens": 3}),
        ("/v1/chat/completions", chat("stuck-guarded", max_tokens=3)),
        ("/v1/chat/completions", chat("stuck-guarded", max_tokens=3, stream=True)),
        ("/v1/messages", chat("stuck-guarded", max_tokens=3, stream=True)),
        ("/v1/responses", response),
        ("/v1/responses", {**response, "background": True}),
    ]
    requests = [Request(stack, key, path, body) for path, body in bodies]
    wait_until(lambda: in_flight(stack, "stuck") == len(bodies), what="all requests on their engine")
    stack.kill("stuck-0")
    *answers, in_background = [request.answer() for request in requests]
    for answer in answers:
        assert answer.status == 200, answer.data
        assert answer.headers["x-headrace-variant"] == "a"
        assert answer.headers["x-headrace-assigned-variant"] == "stuck"
        assert answer.headers["x-headrace-fallback"] == "stuck"
        assert b"error" not in answer.data.replace(b'"error":null', b"")

    def retrieved() -> Any:
        return send(stack.url, "GET", f"/v1/responses/{in_background.json['id']}", key=key).json

    wait_until(lambda: retrieved()["status"] not in ("queued", "in_progress"), what="the response")
    assert retrieved()["status"] == "incomplete"  # it has the length that was asked for
    assert retrieved()["usage"]["output_tokens"] == 3
    wait_until(lambda: in_flight(stack, "a") == 0, what="an idle engine")


def test_a_gateway_that_ends_ends_its_copies_and_does_not_wait_for_them(stack: Stack, key: str):
    first, url = stack.processes["gateway"], stack.urls[0]
    assert stack.url != url
    wait_until(lambda: engine_of(stack, "b")["load"]["num_running"] == 0, what="copies of before")
    complete(stack, key, "shadowed", url=url, max_tokens=2000)
    wait_until(lambda: engine_of(stack, "b")["load"]["num_running"] == 1, what="the copy")
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=10) == 0  # the copy takes forty seconds
    wait_until(lambda: engine_of(stack, "b")["load"]["num_running"] == 0, what="its end")


def test_after_the_first_byte_there_is_no_other_variant(stack: Stack, key: str):
    body = chat("late", max_tokens=500, stream=True)
    with Request(stack, key, "/v1/chat/completions", body) as request:
        assert request.first_line.startswith(b"data: ")
        stack.kill("b-0")
        answer = request.answer()
    assert answer.headers["x-headrace-variant"] == "b"
    assert b'"upstream_error"' in answer.data
    assert b"[DONE]" not in answer.data


# ---------------------------------------------------------------------- helpers


def engine_of(stack: Stack, model: str) -> dict[str, Any]:
    engines = [each for each in stack.admin_status()["engines"] if each["model"] == model]
    return engines[0] if engines else {"load": None, "in_flight": 0}


def in_flight(stack: Stack, model: str) -> int:
    return engine_of(stack, model)["in_flight"]


def without_names(data: bytes, model: str) -> str:
    """What two answers to one request may differ in is left out: ids, the model's name, times."""
    text = data.decode().replace(f'"model":"{model}"', "")
    text = re.sub(r'"(id|item_id|response_id)":"[^"]*"', "", text)
    return re.sub(r'"(created|created_at|completed_at)":[0-9.]+', "", text)


class Request:
    """One that is answered while the test does something else."""

    def __init__(self, stack: Stack, key: str, path: str, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=30)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection.request("POST", path, json.dumps(body), headers)
        self._response: http.client.HTTPResponse | None = None
        self._begun = b""

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @property
    def first_line(self) -> bytes:
        self._response = self._connection.getresponse()
        self._begun = self._response.readline()
        return self._begun

    def answer(self) -> Answer:
        response = self._response or self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, self._begun + response.read())


class Occupied:
    """So many requests run on, or wait for, the one engine of a model."""

    def __init__(self, stack: Stack, key: str, model: str, number: int) -> None:
        self._stack, self._key, self._model, self._number = stack, key, model, number
        self._requests: list[Request] = []

    def __enter__(self) -> None:
        body = {"model": self._model, "prompt": "x", "max_tokens": 1000}
        for number in range(1, self._number + 1):  # one by one: who waits must find the other one running
            self._requests.append(Request(self._stack, self._key, "/v1/completions", body))
            wait_until(lambda number=number: self._is_so(number), what="an occupied engine")

    def __exit__(self, *_: object) -> None:
        for request in self._requests:
            request.__exit__()
        wait_until(lambda: self._is_so(0), what="a free engine")

    def _is_so(self, number: int) -> bool:
        load = engine_of(self._stack, self._model)["load"]
        return load["num_running"] + load["num_waiting"] == number
