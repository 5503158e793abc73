"""Every field of every request, with values that it should not have.

What comes back is an answer, or a refusal that names the field; it comes soon; and the engine behind it
neither ends nor keeps anything. The fields are those of the schemas and message types, so that a new one is
tried without being added here.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from gateway.openai.embeddings_body import EmbeddingsBody
from gateway.openai.schema import Body, ChatCompletionBody, CompletionBody
from gateway.openai.scoring_body import RerankBody, ScoreBody
from gateway.openai.tokenization_body import DetokenizeBody, TokenizeChatBody, TokenizePromptBody
from shared.identifiers import GatewayId, RequestId, TenantId
from shared.messages import (
    PROTOCOL_VERSION,
    Abort,
    Embed,
    FromGateway,
    GatewayHello,
    Heartbeat,
    ProtocolError,
    Reject,
    ResetPrefixCache,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.sampling import BeamSearch, SamplingParams, StructuredOutput
from tests.http_client import KeptConnection
from tests.integration.engine_peer import engine, expected_tokens, peer, stop
from tests.odd_values import ODD_VALUES, as_json
from tests.stack import Stack, fake_model
from tests.unharmed_stack import unharmed

TIME_LIMIT_S = 10.0  # for one answer, on a machine that is busy; most take milliseconds

MESSAGES = [{"role": "user", "content": "hi"}]
BASE: dict[type[Body], dict[str, Any]] = {
    ChatCompletionBody: {"model": "fake", "messages": MESSAGES, "max_tokens": 2, "seed": 1},
    CompletionBody: {"model": "fake", "prompt": "hi", "max_tokens": 2, "seed": 1},
    EmbeddingsBody: {"model": "embedder", "input": "hi"},
    ScoreBody: {"model": "embedder", "text_1": "hi", "text_2": "ho"},
    RerankBody: {"model": "embedder", "query": "hi", "documents": ["ho"]},
    TokenizePromptBody: {"model": "fake", "prompt": "hi"},
    TokenizeChatBody: {"model": "fake", "messages": MESSAGES},
    DetokenizeBody: {"model": "fake", "tokens": [1]},
}
PATHS = {
    ChatCompletionBody: "/v1/chat/completions",
    CompletionBody: "/v1/completions",
    EmbeddingsBody: "/v1/embeddings",
    ScoreBody: "/v1/score",
    RerankBody: "/v1/rerank",
    TokenizePromptBody: "/tokenize",
    TokenizeChatBody: "/tokenize",
    DetokenizeBody: "/detokenize",
}
# Of which a whole answer has all of one line.
ANSWERS = ({"choices", "usage"}, {"data", "usage"}, {"results", "usage"}, {"tokens", "count"}, {"prompt"})
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CHOICE = {"type": "function", "function": {"name": "f"}}
CALLING = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
]
# What stands around a field inside of others.
AROUND: dict[tuple[str, ...], dict[str, Any]] = {
    ("messages",): {"messages": MESSAGES},
    ("messages", "content"): {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ("documents",): {"documents": [{"text": "hi"}]},
    ("stream_options",): {"stream": True, "stream_options": {}},
    ("response_format",): {"response_format": {"type": "text"}},
    ("response_format", "json_schema"): {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    },
    ("structured_outputs",): {"structured_outputs": {}},
    ("messages", "tool_calls"): {"messages": CALLING},
    ("messages", "tool_calls", "function"): {"messages": CALLING},
    ("tools",): {"tools": TOOLS},
    ("tools", "function"): {"tools": TOOLS},
    ("tool_choice",): {"tools": TOOLS, "tool_choice": CHOICE},
    ("tool_choice", "function"): {"tools": TOOLS, "tool_choice": CHOICE},
}


def bodies_in(annotation: Any) -> set[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return {annotation}
    return {body for part in typing.get_args(annotation) for body in bodies_in(part)}


def places_of(kind: type[Body]) -> Iterator[tuple[str, ...]]:
    """The path to every field of a body, those of the bodies inside it included."""
    for name, info in kind.model_fields.items():
        place = info.alias or name
        yield (place,)
        for inner in bodies_in(info.annotation):
            for rest in places_of(inner):
                yield (place, *rest)


PLACES = [(kind, place) for kind in BASE for place in places_of(kind)]


def document_with(kind: type[Body], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A request that is right but for one field."""
    *outer, last = place
    assert not outer or tuple(outer) in AROUND, f"say in AROUND what stands around {place}"
    document: dict[str, Any] = json.loads(json.dumps(BASE[kind] | AROUND.get(tuple(outer), {})))
    target: Any = document
    for name in outer:
        target = target[name]
        target = target[0] if isinstance(target, list) else target
    target[last] = value
    return document


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    models = [
        fake_model(max_model_len=2048, max_num_seqs=16),
        fake_model("embedder", max_model_len=128, runner="pooling"),
    ]
    with Stack(redis_url, {"models": models}) as stack, unharmed(stack):
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[KeptConnection]:
    connection = KeptConnection(stack.url, stack.key(), TIME_LIMIT_S)
    yield connection
    connection.close()


def complaint_about(place: tuple[str, ...], status: int, data: bytes) -> str:
    """What is wrong with the answer to a request of which one field is odd; nothing if it is right."""
    if status == 200:
        if data.startswith(b"data:"):
            is_whole = data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data
        else:
            is_whole = any(names <= json.loads(data).keys() for names in ANSWERS)
        return "" if is_whole else f"half an answer: {data[-200:]!r}"
    error = json.loads(data)["error"]
    if set(error) != {"message", "type", "param", "code"} or not 400 <= status < 500:
        return f"{status}: {error}"
    named = [name for name in re.split(r"\[\d+\]\.?|\.", error["param"] or "") if name]
    is_named = bool(named) and all(a == b for a, b in zip(named, place, strict=False))
    if not is_named:
        return f"{error['param']!r} is named: {error['message'][:200]}"
    return ""


def is_about_streaming(status: int, data: bytes) -> bool:
    """Some values do not go with streaming; then either field may be named."""
    return status == 400 and json.loads(data)["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("kind", "place"), PLACES, ids=[f"{kind.__name__}-{'.'.join(place)}" for kind, place in PLACES]
)
def test_an_odd_value_in_a_field_is_served_or_refused_by_its_name(
    client: KeptConnection, kind: type[Body], place: tuple[str, ...]
) -> None:
    complaints = {}
    for label, value in ODD_VALUES.items():
        document = document_with(kind, place, value)
        status, data = client.send(PATHS[kind], as_json(document))
        if complaint := complaint_about(place, status, data):
            complaints[label] = complaint
        if status == 200 and "stream" in kind.model_fields.keys() - document.keys():
            status, data = client.send(PATHS[kind], as_json(document | {"stream": True}))
            complaint = complaint_about(place, status, data)
            if complaint and not is_about_streaming(status, data):
                complaints[f"{label}, streamed"] = complaint
    assert not complaints
    status, data = client.send(PATHS[kind], as_json(BASE[kind]))
    assert status == 200, data


# -------------------------------------------------------------------------- at the wire

SUBMIT = Submit(RequestId("r"), [65, 66, 67], SamplingParams(2, seed=1, temperature=0.0), TenantId("acme"))
FORM = StructuredOutput("regex", "[a-c]")
MESSAGES_TO_ENGINES: dict[str, FromGateway] = {
    "hello": GatewayHello(PROTOCOL_VERSION, GatewayId("gateway-b"), ["a bundle"]),
    "submit": SUBMIT,
    "submit with a form": replace(SUBMIT, sampling=replace(SUBMIT.sampling, structured_output=FORM)),
    "submit with beams": replace(SUBMIT, sampling=replace(SUBMIT.sampling, beam_search=BeamSearch(2))),
    "abort": Abort([RequestId("none")]),
    "embed": Embed(RequestId("r"), [[65, 66]], TenantId("acme")),
    "reset": ResetPrefixCache(),
}
ONLY_IN_MSGPACK: dict[str, Any] = {
    "bytes": b"x",
    "long bytes": b"x" * 100_000,
    "extension": msgspec.msgpack.Ext(7, b"x"),
    "dict with a key that is a list": {(1, 2): 3},
}


def on_the_wire(value: Any) -> Any:
    """Messages as lists of all their fields, those with a default value, too."""
    if isinstance(value, msgspec.Struct):
        return [on_the_wire(field) for field in msgspec.structs.astuple(value)]
    return msgspec.to_builtins(value)


def places_in(message: msgspec.Struct) -> Iterator[tuple[int, ...]]:
    """The positions of every field, those of the structures inside it included."""
    for index, value in enumerate(msgspec.structs.astuple(message)):
        yield (index,)
        if isinstance(value, msgspec.Struct):
            yield from ((index, *rest) for rest in places_in(value))


def odd_documents(message: FromGateway) -> Iterator[list[Any]]:
    """The message with each field in turn replaced by each odd value; with too many and too few fields."""
    for place in places_in(message):
        for value in (*ODD_VALUES.values(), *ONLY_IN_MSGPACK.values()):
            document = on_the_wire(message)
            target = document
            for index in place[:-1]:
                target = target[index]
            target[place[-1]] = value
            yield document
    whole = on_the_wire(message)
    yield [*whole, 1, "x", None]
    yield from (whole[:length] for length in range(len(whole)))


def odd_payloads(message: FromGateway) -> Iterator[bytes]:
    """Each under an id of its own, where its id is not what is odd."""
    for number, document in enumerate(odd_documents(message)):
        if document[:1] == ["r"]:
            document[0] = f"odd-{number}"
        with contextlib.suppress(OverflowError, UnicodeEncodeError):  # msgpack cannot say 400 digits
            yield msgspec.msgpack.encode(document)
    payload = msgspec.msgpack.encode(on_the_wire(message))
    yield from (payload[:length] for length in range(len(payload)))


@pytest.fixture(scope="module")
def engine_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an engine that is alive and has lost nothing at the end of all tests."""
    directory = tmp_path_factory.mktemp("engine")
    config = directory / "engine.toml"
    config.write_text('[[models]]\nname = "e"\nsource = "fake:"\nmax_model_len = 200\n')
    address = f"ipc://{directory}/engine.sock"
    log: list[str] = []
    with engine(address, "--config", str(config), source=None) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=log.extend, args=(process.stderr,))  # lest it waits for a reader
        reader.start()
        yield address
        assert process.poll() is None
        stop(process)
        reader.join()
    assert "Traceback" not in "".join(log)


def test_every_type_of_message_is_tried() -> None:
    assert {type(it) for it in MESSAGES_TO_ENGINES.values()} == set(typing.get_args(FromGateway))


@pytest.mark.parametrize("kind", MESSAGES_TO_ENGINES)
def test_an_odd_field_of_a_message_is_served_rejected_or_dropped(engine_address: str, kind: str) -> None:
    """What is no message is dropped; all else that asks for something gets its answer."""
    message = MESSAGES_TO_ENGINES[kind]
    frame = encode(message)[0]
    with peer(engine_address) as gateway, peer(engine_address, "gateway-b") as odd:
        epoch = gateway.hello().epoch
        odd.hello()
        odd.socket.setsockopt(zmq.SNDTIMEO, int(1000 * TIME_LIMIT_S))
        asked: dict[str, FromGateway] = {}
        for payload in odd_payloads(message):
            odd.socket.send_multipart([frame, payload])
            with contextlib.suppress(ProtocolError):
                decoded = decode([frame, payload])
                if isinstance(decoded, Submit | Embed):
                    asked[decoded.request_id] = decoded
        while asked:
            assert odd.socket.poll(int(1000 * TIME_LIMIT_S)), (
                f"no answer to {next(iter(asked.values()))!r:.500}"
            )
            answer = odd.receive()
            if isinstance(answer, Reject):
                asked.pop(answer.request_id, None)
            elif isinstance(answer, StepResult):
                for update in answer.updates:
                    if update.finish_reason is not None:
                        asked.pop(update.request_id, None)
        submit = gateway.submit("plain", max_tokens=9)
        gateway.wait_until_finished("plain")
        assert gateway.tokens("plain") == expected_tokens(submit)
        gateway.wait_until_idle()
        beats = [each for each in gateway.messages if isinstance(each, Heartbeat)]
        assert {beat.epoch for beat in beats} == {epoch}
