"""Structured output with the process that tries grammars out, and through a whole stack."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import psutil
import pytest

from engine_service.refusal import Refusal
from engine_service.structured_output import llguidance_grammar
from engine_service.structured_output.grammar_desk import GrammarDesk
from engine_service.structured_output.llguidance_compiler import LlguidanceCompiler
from shared.byte_text import byte_text_bundle
from shared.identifiers import RequestId
from shared.sampling import StructuredOutput
from tests.http_client import Answer, send
from tests.stack import Stack, fake_model, wait_until
from tests.unit.grammar_worlds import form, run_to_the_end, vocabulary_of
from tests.unit.worlds import expected_output, make_world

MIB = 1024 * 1024


class RealDesk:
    """A desk with the real compiler, asked for one form at a time."""

    def __init__(self, **options: float) -> None:
        self.compiler = LlguidanceCompiler(vocabulary_of(byte_text_bundle()), **options)
        self.desk = GrammarDesk(self.compiler)
        self._woken = threading.Semaphore(0)
        self.desk.wake_with(self._woken.release)

    def refusal(self, structured_output: StructuredOutput) -> str:
        """The message; "" if the form was compiled."""
        self.desk.order(RequestId("x"), structured_output, time.monotonic())
        assert self._woken.acquire(timeout=60)
        ((_, result),) = self.desk.take_ready(0.0)
        if not isinstance(result, Refusal):
            return ""
        assert (result.code, result.param) == ("invalid_request", "response_format")
        return result.message


@pytest.fixture(scope="module")
def desk() -> Iterator[RealDesk]:
    desk = RealDesk()
    yield desk
    desk.desk.close()


def chain(length: int, link: str) -> StructuredOutput:
    """References, each to the next one."""
    definitions = {f"a{i}": json.loads(link.replace("NEXT", f"#/$defs/a{i + 1}")) for i in range(length)}
    schema = {"$defs": {**definitions, f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}
    return form("json_schema", json.dumps(schema, separators=(",", ":")))


def rules(length: int, link: str, name: str = "r") -> StructuredOutput:
    lines = [link.replace("THIS", f"{name}{i}").replace("NEXT", f"{name}{i + 1}") for i in range(length)]
    return form("grammar", "\n".join([f"start: {name}0", *lines, f'{name}{length}: "a"']))


HOSTILE = {
    "references": chain(7000, '{"$ref":"NEXT"}'),
    "alternatives": chain(4000, '{"anyOf":[{"$ref":"NEXT"},{"type":"string"}]}'),
    "conjunctions": chain(4000, '{"allOf":[{"$ref":"NEXT"},{"minimum":1}]}'),
    "arrays": chain(4500, '{"items":{"$ref":"NEXT"}}'),
    "rules": rules(4400, "THIS: NEXT"),
    "doubling rules": rules(3500, "THIS: NEXT NEXT"),
    "terminals": rules(3600, 'THIS: NEXT "a"', "T"),
    "parentheses": form("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "groups": form("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "repetitions": form("regex", "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"),
    "conjunction of unions": form(
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(5)]} for i in range(12)]},
    ),
    "properties": form("json_schema", {"properties": {f"p{i}": {"enum": [i]} for i in range(4000)}}),
    "values": form("json_schema", {"enum": ["x" * 20 + str(i) for i in range(8000)]}),
    "nested braces": form("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
    "too large": form("json_schema", {"description": "x" * llguidance_grammar.MAX_SCHEMA_BYTES}),
    "too large a regex": form("regex", "a" * (llguidance_grammar.MAX_GRAMMAR_BYTES + 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_costs_at_most_itself(desk, name):
    """It compiles or is refused, in bounded time and memory; and the next one finds all in order."""
    before = resident_bytes()
    started = time.monotonic()
    message = desk.refusal(HOSTILE[name])
    added_mib = (resident_bytes() - before) // MIB
    print(f"{name}: {time.monotonic() - started:.2f} s, +{added_mib} MiB, {message[:80]!r}")
    assert added_mib < 300
    assert desk.refusal(form("choice", [name])) == ""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_what_takes_too_long_is_refused():
    desk = RealDesk(trial_limit_s=0.3)
    message = desk.refusal(HOSTILE["properties"])
    assert "takes longer than 0.3 s" in message
    assert desk.refusal(form("choice", ["next"])) == ""
    desk.desk.close()


def test_a_trial_process_that_was_killed_is_replaced(desk):
    assert desk.refusal(form("choice", ["before"])) == ""
    (process,) = trial_processes()
    os.kill(process, signal.SIGKILL)
    assert desk.refusal(form("choice", ["after"])) == ""


def test_a_closed_desk_leaves_no_process(desk):
    others = trial_processes()
    own = RealDesk()
    assert own.refusal(form("json_object")) == ""
    assert len(trial_processes()) == len(others) + 1
    own.desk.close()
    own.desk.close()
    assert trial_processes() == others


def trial_processes() -> list[int]:
    """Living children of this process that try grammars out."""
    return [
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and any("structured_output.trial" in a for a in child.cmdline())
    ]


def test_good_and_bad_forms_arrive_together_and_only_the_bad_ones_are_refused():
    desk = RealDesk().desk
    world = make_world(grammars=desk, vocab_size=261, eos_token_id=256, num_blocks=400)
    free = world.add("free", [1, 2, 3], max_tokens=30)
    world.add("good", [1], max_tokens=50, structured_output=form("regex", "[ab]{3}"))
    world.add("recursive", [2], structured_output=form("json_schema", {"$ref": "#"}))
    world.add("invalid", [3], structured_output=form("json_schema", {"type": "strin"}))
    world.add("crash", [4], structured_output=HOSTILE["groups"])
    run_to_the_end(world)
    desk.close()
    assert set(world.refusals) == {"recursive", "invalid", "crash"}
    assert {refusal.param for refusal in world.refusals.values()} == {"response_format"}
    assert re.fullmatch("[ab]{3}", bytes(world.output["good"]).decode())
    assert world.output["free"] == expected_output(free, world.runner._model)


# ---------------------------------------------------------------------- the whole stack

USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


# 1 is an integer and a number, so no grammar can keep to exactly one of the two
EITHER = {"type": "object", "properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": EITHER}}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, {"models": [fake_model(max_model_len=2048)]}) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    return stack.key()


def chat(stack: Stack, key: str, **fields) -> Answer:
    body = {"model": "fake", "messages": [USER], "max_tokens": 600, **fields}
    return send(stack.url, "POST", "/v1/chat/completions", body, key=key)


def texts(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.data
    choices = answer.json["choices"]
    return [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]


def test_a_json_schema_through_the_stack(stack, key):
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    valid = texts(chat(stack, key, response_format=response_format, n=4, seed=3))
    assert len(valid) >= 3
    for text in valid:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("structured_outputs", "pattern"),
    [
        ({"regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'start: "x"~2..4'}, "x{2,4}"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
    ids=str,
)
def test_vllm_s_fields_through_the_stack(stack, key, structured_outputs, pattern):
    valid = texts(chat(stack, key, structured_outputs=structured_outputs, n=3))
    assert valid
    for text in valid:
        assert re.fullmatch(pattern, text)


def test_a_stop_string_cuts_what_has_the_form(stack, key):
    (text,) = texts(chat(stack, key, structured_outputs={"regex": "[a-c]{9}END"}, stop="END"))
    assert re.fullmatch("[a-c]{9}", text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "start: ("}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"regex": "a" * 100_000}},
        {"structured_outputs": {"regex": "("}, "stream": True},
        {"tools": [STRICT_TOOL], "tool_choice": "required"},
        {"tools": [STRICT_TOOL], "stream": True},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_a_bad_form_is_a_400_for_its_request_alone(stack, key, fields):
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(chat, stack, key, max_tokens=30) for _ in range(3)]
        answer = chat(stack, key, **fields)
        assert answer.status == 400, answer.data
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"] == next(iter(fields))
        assert all(other.result().status == 200 for other in others)
    wait_until(lambda: not any(stack.gauges().values()), what="an idle stack")
    assert stack.processes["fake-0"].poll() is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, '
        b'"structured_outputs": {"regex": "\\ud800"}}',
        b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, '
        b'"structured_outputs": {"choice": ["\\ud800"]}}',
        b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, '
        b'"structured_outputs": {"json": ' + b'{"items":' * 900 + b"{}" + b"}" * 900 + b"}}",
    ],
    ids=["half a character", "half a choice", "deep"],
)
def test_odd_texts_are_refused(stack, key, body):
    answer = send(stack.url, "POST", "/v1/chat/completions", body, key=key)
    assert answer.status == 400, answer.data
    assert "Traceback" not in stack.log("gateway")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_trial_process_does_not_outlive_its_engine(redis_url, number):
    with Stack(redis_url, {"models": [fake_model()]}) as stack:
        assert texts(chat(stack, stack.key(), structured_outputs={"choice": ["a"]}))
        engine = psutil.Process(stack.processes["fake-0"].pid)
        (trial,) = engine.children()
        stack.kill("fake-0", number)
        stack.processes["fake-0"].wait(20)
        wait_until(lambda: not trial.is_running(), timeout_s=5, what="the end of the trial process")
