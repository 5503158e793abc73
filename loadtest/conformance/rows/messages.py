"""`/v1/messages`: Anthropic's API."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.answer import DONE, Answer
from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.tools import CITIES, TOOLS
from loadtest.conformance.server import Server


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def check_refused(answer: Answer, status: int, kind: str) -> None:
    check_equal(answer.status, status, "status")
    document = answer.json
    check_equal((document["type"], document["error"]["type"]), ("error", kind), "type and error.type")
    check(isinstance(document["error"]["message"], str), "an error without a message")


def tools_of_anthropic() -> list[dict[str, Any]]:
    functions = [tool["function"] for tool in TOOLS]
    return [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]


async def there(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = (await server.message()).ok().json
    return document


@row
async def answer_has_the_shape(server: Server) -> None:
    """A message with text blocks, stop_reason and usage."""
    message = await there(server)
    check_equal((message["type"], message["role"]), ("message", "assistant"), "type and role")
    check_equal(message["content"][0]["type"], "text", "the first block's type")
    check_in(message["stop_reason"], ("end_turn", "max_tokens"), "stop_reason")
    check_equal(message["stop_sequence"], None, "stop_sequence")
    check(message["usage"]["input_tokens"] > 0 and message["usage"]["output_tokens"] > 0, "no usage")


@row
async def max_tokens_is_required(server: Server) -> None:
    """Without max_tokens it is a 400 in Anthropic's shape."""
    await there(server)
    body = server.message_body()
    del body["max_tokens"]
    answer = await server.post("/v1/messages", body, headers=server.anthropic_headers, key=None)
    check_refused(answer, 400, "invalid_request_error")


@row
async def max_tokens_ends_with_its_name(server: Server) -> None:
    """An answer that is cut says max_tokens."""
    message = (await server.message(max_tokens=4)).ok().json
    found = (message["stop_reason"], message["usage"]["output_tokens"])
    check_equal(found, ("max_tokens", 4), "stop_reason and output_tokens")


@row
async def events_come_in_order(server: Server) -> None:
    """From message_start to message_stop, named as their type, without [DONE]."""
    stream = (await server.message_stream()).ok()
    events = [event for event in stream.events if event.name != "ping"]
    check(all(event.data != DONE for event in events), "[DONE] is not Anthropic's")
    types = [document["type"] for document in stream.documents if document["type"] != "ping"]
    check_equal([event.name for event in events], types, "the names of events")
    order = ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
             "message_delta", "message_stop"]  # fmt: skip
    check_equal(list(dict.fromkeys(types)), order, "the order")


@row
async def deltas_add_up(server: Server) -> None:
    """Deltas are the whole answer's text, and usage its tokens."""
    whole = await there(server)
    documents = (await server.message_stream()).ok().documents
    deltas = [d["delta"]["text"] for d in documents if d["type"] == "content_block_delta"]
    check_equal("".join(deltas), text_of(whole), "the streamed text")
    last = next(d for d in documents if d["type"] == "message_delta")
    found = (last["delta"]["stop_reason"], last["usage"]["output_tokens"])
    check_equal(
        found, (whole["stop_reason"], whole["usage"]["output_tokens"]), "stop_reason and output_tokens"
    )


@row
async def a_stop_sequence_is_told(server: Server) -> None:
    """The answer ends before the stop sequence, and says which it was."""
    text = text_of((await server.message(max_tokens=48)).ok().json)
    if len(text) < 16:
        raise NotApplicable(f"the model says too little: {text!r}")
    stop = text[len(text) // 2 :][:4]
    if not stop.strip():
        raise NotApplicable("there is no stop sequence to cut")
    message = (await server.message(max_tokens=48, stop_sequences=[stop])).ok().json
    check_equal(
        (message["stop_reason"], message["stop_sequence"]), ("stop_sequence", stop), "what stopped it"
    )
    check_equal(text_of(message), text[: text.find(stop)], "the text")


@row
async def system_may_be_text_or_blocks(server: Server) -> None:
    """Both forms of system say the same."""
    plain = (await server.message(system="Be brief.")).ok().json
    blocks = (await server.message(system=[{"type": "text", "text": "Be brief."}])).ok().json
    check_equal(text_of(blocks), text_of(plain), "the text")


@row
async def tokens_can_be_counted(server: Server) -> None:
    """count_tokens says what the message's usage adds up to, read from a cache or not."""
    body = server.message_body()
    for name in ("max_tokens", "temperature"):
        del body[name]
    answer = await server.post("/v1/messages/count_tokens", body, headers=server.anthropic_headers, key=None)
    count = answer.ok().json["input_tokens"]
    usage = (await there(server))["usage"]
    cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    check_equal(count, usage["input_tokens"] + cached, "input_tokens")


@row
async def errors_have_anthropics_shape(server: Server) -> None:
    """Unknown models are not_found_error, wrong fields invalid_request_error."""
    await there(server)
    check_refused(await server.message(model="no-such-model"), 404, "not_found_error")
    check_refused(await server.message(temperature="hot"), 400, "invalid_request_error")


@row
async def a_wrong_key_is_refused(server: Server) -> None:
    """A wrong x-api-key is authentication_error."""
    await server.needs_keys()
    await there(server)
    headers = server.anthropic_headers | {"x-api-key": "wrong-key"}
    answer = await server.post("/v1/messages", server.message_body(), headers=headers, key=None)
    check_refused(answer, 401, "authentication_error")


@row
async def a_tool_is_used(server: Server) -> None:
    """tool_choice any gives a tool_use block whose input is an object."""
    fields: dict[str, Any] = {
        "tools": tools_of_anthropic(),
        "tool_choice": {"type": "any"},
        "max_tokens": 512,
    }
    message = (await server.message(**fields)).ok("tool").json
    if message["stop_reason"] == "max_tokens":
        raise NotApplicable("the model did not come to an end in time")
    blocks = [block for block in message["content"] if block["type"] == "tool_use"]
    check(blocks and blocks[0]["id"], "no tool was used")
    check_equal(message["stop_reason"], "tool_use", "stop_reason")
    check_in(blocks[0]["input"]["city"], CITIES[blocks[0]["name"]], "city")


@row
async def streamed_input_adds_up(server: Server) -> None:
    """input_json_delta pieces are a JSON object."""
    fields: dict[str, Any] = {
        "tools": tools_of_anthropic(),
        "tool_choice": {"type": "any"},
        "max_tokens": 512,
    }
    documents = (await server.message_stream(**fields)).ok("tool").documents
    first = next((d["index"] for d in documents if d["type"] == "content_block_start"
                  and d["content_block"]["type"] == "tool_use"), None)  # fmt: skip
    check(first is not None, "no tool was used")
    pieces = [d["delta"]["partial_json"] for d in documents
              if d["type"] == "content_block_delta" and d["index"] == first]  # fmt: skip
    check_equal(set(json.loads("".join(pieces))), {"city"}, "the set of fields")
