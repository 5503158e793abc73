"""The interface as the OpenAPI document describes it, before a real stack: examples, generated cases, and
bodies that are broken in every way. What is random prints its seed."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import jsonschema_rs
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openapi.document import make_document
from gateway.openapi.operation import Access, Operation
from gateway.openapi.operations import OPERATIONS
from tests.fuzzed_bodies import fuzzed_bodies
from tests.http_client import Answer, KeptConnection, send
from tests.request_bodies import EXAMPLES
from tests.stack import ADMIN_TOKEN, Stack, fake_model
from tests.unharmed_stack import unharmed

TIME_LIMIT_S = 20.0  # for one answer, on a machine that is busy; most take milliseconds
NUM_CASES, NUM_SOAK_CASES = 300, 2000
NUM_BODIES, NUM_SOAK_BODIES = 1000, 10_000
NUM_CONNECTIONS = 4
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DOCUMENT = make_document(OPERATIONS)
# Of one with nothing to vary, one case says all.
VARIED = [operation for operation in OPERATIONS if operation.body or operation.parameters]
POSTED = [operation for operation in OPERATIONS if operation.body is not None]  # or put
SOME_NAME = "example"  # where a path wants one
ABOUT_SOMETHING_ELSE = ("createFeedback", "updateKey", "rotateKey")  # that the examples do not make


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    models = [
        fake_model(max_model_len=1024, max_num_seqs=16),
        fake_model("embedder", max_model_len=128, runner="pooling"),
    ]
    with Stack(redis_url, {"models": models}) as stack, unharmed(stack):
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


def secret_for(operation: Operation, key: str) -> str:
    return ADMIN_TOKEN if operation.access == Access.ADMIN else key


def soak(*arguments: Any) -> Any:
    return pytest.param(*arguments, marks=[pytest.mark.soak, pytest.mark.timeout(3600)], id="soak")


# ------------------------------------------------------------------------------------ as served


def test_the_document_is_served_without_a_key_and_once_only_to_who_has_it(stack: Stack) -> None:
    answer = send(stack.url, "GET", "/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == DOCUMENT
    tag = answer.headers["etag"]
    again = send(stack.url, "GET", "/openapi.json", headers={"If-None-Match": f'"other", {tag}'})
    assert (again.status, again.data, again.headers["etag"]) == (304, b"", tag)
    assert send(stack.url, "GET", "/openapi.json", headers={"If-None-Match": '"other"'}).status == 200


@pytest.mark.parametrize("operation", POSTED, ids=lambda operation: operation.operation_id)
def test_examples_are_answered_as_described(stack: Stack, key: str, operation: Operation) -> None:
    for path in (operation.path, *operation.aliases):
        for example in EXAMPLES[operation.path]:
            answer = send_to(stack, operation, path, example, secret_for(operation, key))
            # Of feedback the examples are about an answer that nobody has given.
            expected = (404,) if operation.operation_id in ABOUT_SOMETHING_ELSE else (200, 201)
            assert answer.status in expected, (example, answer.data)
            if answer.status == 200 and example.get("stream") and operation.streams:
                assert answer.headers["content-type"].startswith("text/event-stream")
            else:
                check_answer(operation, answer.status, answer.json)
        refusal = send_to(stack, operation, path, {"model": 1}, secret_for(operation, key))
        assert refusal.status == 400
        check_answer(operation, refusal.status, refusal.json)
        stranger = send_to(stack, operation, path, {}, "hr-wrong")
        assert stranger.status == 401
        check_answer(operation, stranger.status, stranger.json)


def send_to(stack: Stack, operation: Operation, path: str, body: Any, secret: str) -> Answer:
    return send(stack.url, operation.method, with_some_name(path), body, key=secret)


def with_some_name(path: str) -> str:
    return path.replace("{name}", SOME_NAME).replace("{key_id}", SOME_NAME)


def is_allowed(operation: Operation, body: bytes) -> bool:
    """By the schema of what is to be sent."""
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]
    content = described["requestBody"]["content"]["application/json"]
    schema = {**content["schema"], "components": DOCUMENT["components"]}
    return jsonschema_rs.is_valid(schema, msgspec.json.decode(body))


def check_answer(operation: Operation, status: int, document: Any) -> None:
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"][str(status)]
    schema = described["content"]["application/json"]["schema"]
    jsonschema_rs.validate({**schema, "components": DOCUMENT["components"]}, document)


def test_a_stored_response_and_its_input_are_told_as_described(stack: Stack, key: str) -> None:
    created = send(stack.url, "POST", "/v1/responses", {"model": "fake", "input": "hi"}, key=key).json
    by_id = {operation.operation_id: operation for operation in OPERATIONS}
    for name, rest in (("retrieveResponse", ""), ("listInputItems", "/input_items"), ("deleteResponse", "")):
        operation = by_id[name]
        answer = send(stack.url, operation.method, f"/v1/responses/{created['id']}{rest}", key=key)
        assert answer.status == 200
        check_answer(operation, 200, answer.json)


# ------------------------------------------------------------------------------- generated cases


@pytest.fixture(scope="module")
def schema(stack: Stack) -> Any:
    config = SchemathesisConfig()
    config.output.sanitization.update(enabled=False)  # it would hide `max_tokens` in what is to be repeated
    return schemathesis.openapi.from_url(f"{stack.url}/openapi.json", config=config)


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value
)
@pytest.mark.parametrize("total", [pytest.param(NUM_CASES, id="some"), soak(NUM_SOAK_CASES)])
def test_generated_requests_are_answered_as_described(
    stack: Stack, key: str, schema: Any, total: int, mode: GenerationMode
) -> None:
    seed = 1 if total == NUM_CASES else time.time_ns() % 2**32
    operations = VARIED if mode == GenerationMode.NEGATIVE else OPERATIONS
    share = total // (2 * len(VARIED)) + 1
    counted: Counter[int] = Counter()
    failures: dict[str, str] = {}
    with requests.Session() as session:
        for operation in operations:
            name = operation.operation_id
            try:
                secret = secret_for(operation, key)
                counted += try_operation(schema, session, operation, mode, secret, share, seed)
            except Exception as error:  # whatever Hypothesis found: the others are tried all the same
                failures[name] = "\n".join([str(error), *getattr(error, "__notes__", ())])
    print(f"seed {seed}, {mode.value}: {counted.total()} cases, {dict(sorted(counted.items()))}")
    assert not failures, "\n\n".join(f"{name}: {text}" for name, text in failures.items())


def try_operation(
    schema: Any,
    session: requests.Session,
    operation: Operation,
    mode: GenerationMode,
    secret: str,
    max_examples: int,
    seed: int,
) -> Counter[int]:
    """How many cases had which status. Raises what a check raised for the smallest case that fails it."""
    counted: Counter[int] = Counter()
    checks = [*CHECKS, negative_data_rejection] if mode == GenerationMode.NEGATIVE else CHECKS
    model = "embedder" if operation.tag == "Embeddings" else "fake"

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(
        case=schema[operation.path][operation.method].as_strategy(generation_mode=mode), knows=st.booleans()
    )
    def check(case: Any, knows: bool) -> None:
        named = case.body.get("model") if isinstance(case.body, dict) else None
        if isinstance(named, str) and 1 <= len(named) <= 256:
            case.body["model"] = model  # lest all be refused for a model that there is not
        if knows and "name" in (case.path_parameters or {}):
            case.path_parameters["name"] = model
        headers = {"Authorization": f"Bearer {secret}"}
        response = case.call(headers=headers, session=session, timeout=TIME_LIMIT_S)
        counted[response.status_code] += 1
        case.validate_response(response, checks=checks)
        is_served = response.status_code in (200, 201)
        if is_served and operation.body is not None and response.request.body:
            assert is_allowed(operation, response.request.body), response.request.body

    check()
    return counted


# --------------------------------------------------------------------------------- broken bodies


@pytest.mark.parametrize("total", [pytest.param(NUM_BODIES, id="some"), soak(NUM_SOAK_BODIES)])
def test_a_broken_body_is_refused_or_served_and_never_a_failure(stack: Stack, key: str, total: int) -> None:
    seed = 1 if total == NUM_BODIES else time.time_ns() % 2**32
    share = -(-total // (len(POSTED) * NUM_CONNECTIONS))

    def send_share(number: int) -> tuple[Counter[int], list[str]]:
        statuses: Counter[int] = Counter()
        complaints: list[str] = []
        for operation in POSTED:
            randomness = random.Random(f"{seed} {number} {operation.path}")
            connection = KeptConnection(stack.url, secret_for(operation, key), TIME_LIMIT_S)
            bodies = fuzzed_bodies(EXAMPLES[operation.path], randomness)
            for body in itertools.islice(bodies, share):
                status, data = connection.send(with_some_name(operation.path), body, operation.method)
                statuses[status] += 1
                if complaint := complaint_about(operation, body, status, data):
                    complaints.append(f"{operation.path} {body[:2000]!r}: {complaint}")
            connection.close()
        return statuses, complaints

    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        results = list(pool.map(send_share, range(NUM_CONNECTIONS)))
    counted = sum((found for found, _ in results), Counter())
    print(f"seed {seed}: {counted.total()} bodies, {dict(sorted(counted.items()))}")
    complaints = [complaint for _, found in results for complaint in found]
    assert not complaints, "\n".join(complaints)
    assert {200, 400} <= counted.keys()


def complaint_about(operation: Operation, body: bytes, status: int, data: bytes) -> str:
    """What is wrong with an answer; nothing if it is right."""
    if status >= 500:
        return f"{status}: {data[:300]!r}"
    if status in (200, 201) and body and not is_allowed(operation, body):
        return "served, though the schema does not allow it"
    if status == 200 and operation.streams and data.startswith((b"data:", b"event:")):
        return ""
    try:
        check_answer(operation, status, json.loads(data))
    except (ValueError, KeyError, jsonschema_rs.ValidationError) as error:
        return f"{status}, not as described: {error}"
    return ""
