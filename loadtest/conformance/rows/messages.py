"""`/v1/messages`: Anthropic's API."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.answer import DONE, Answer
from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.chat import PIXEL
from loadtest.conformance.rows.streams import LIKE_FRAMING, LIKE_THE_END, MANY_SCRIPTS, form_of
from loadtest.conformance.server import ANTHROPIC_VERSION, QUESTION, Server


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def length_of(message: dict[str, Any]) -> int:
    """Of its prompt: Anthropic tells what was read from a cache, or written to one, apart."""
    usage = message["usage"]
    apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return int(usage["input_tokens"] + sum(usage.get(name) or 0 for name in apart))


def check_refused(answer: Answer, status: int, kind: str) -> None:
    check_equal(answer.status, status, "status")
    document = answer.json
    check_equal((document["type"], document["error"]["type"]), ("error", kind), "type and error.type")
    check(isinstance(document["error"]["message"], str), "an error without a message")


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
    check_equal(count, length_of(await there(server)), "input_tokens")


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
async def a_bearer_token_is_a_key(server: Server) -> None:
    """Clients that are told of a token rather than a key send it as `Authorization: Bearer`."""
    await server.needs_keys()
    await there(server)
    headers = {"anthropic-version": ANTHROPIC_VERSION}
    (await server.post("/v1/messages", server.message_body(max_tokens=1), headers=headers)).ok()


@row
async def every_answer_has_a_request_id(server: Server) -> None:
    """The header request-id is on answers, streams and errors, and never the same."""
    answers = [
        (await server.message(max_tokens=1)).ok(),
        (await server.message_stream(max_tokens=1)).answer,
        await server.message(temperature="hot"),
    ]
    ids = {answer.headers.get("request-id") for answer in answers} - {None}
    check_equal(len(ids), len(answers), "the number of different ids")


@row
async def text_blocks_are_a_text(server: Server) -> None:
    """Content in a text block means what the string means."""
    blocks = [{"type": "text", "text": QUESTION}]
    parted = (await server.message(messages=[{"role": "user", "content": blocks}])).ok().json
    check_equal(text_of(parted), text_of(await there(server)), "the text")


@row
async def images_are_seen_or_refused(server: Server) -> None:
    """Who sees no images refuses them, and names where they are; another one's prompt grows by them."""
    await there(server)
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
    text = {"type": "text", "text": "What is it?"}
    content = [{"type": "image", "source": source}, text]
    answer = await server.message(messages=[{"role": "user", "content": content}], max_tokens=1)
    if answer.status == 200:
        alone = (await server.message(messages=[{"role": "user", "content": [text]}], max_tokens=1)).ok()
        lengths = [length_of(each.json) for each in (alone, answer)]
        check(
            lengths[0] < lengths[1], f"prompts of {lengths[0]} and {lengths[1]} tokens: the image is dropped"
        )
    else:
        check_refused(answer, 400, "invalid_request_error")
        check("messages" in answer.says, f"it only says {answer.says!r}")


@row
async def an_answer_may_be_begun(server: Server) -> None:
    """A last message of the assistant is continued rather than answered."""
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    begun = (await server.message(messages=turns, max_tokens=4)).ok("messages").json
    closed = (
        (await server.message(messages=[*turns, {"role": "user", "content": "."}], max_tokens=4)).ok().json
    )
    lengths = [length_of(message) for message in (begun, closed)]
    check(lengths[0] < lengths[1], f"prompts of {lengths[0]} and {lengths[1]} tokens")


@row
async def hostile_text_arrives(server: Server) -> None:
    """Text that looks like the framing of a stream, or has characters of several bytes, comes whole."""
    for text in (LIKE_THE_END, LIKE_FRAMING, MANY_SCRIPTS):
        schema = form_of(text)["json_schema"]["schema"]
        fields = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "max_tokens": 512}
        documents = (await server.message_stream(**fields)).ok("output_config").documents
        last = next(d for d in documents if d["type"] == "message_delta")
        if last["delta"]["stop_reason"] == "max_tokens":
            raise NotApplicable("the model did not come to an end within 512 tokens")
        deltas = [d["delta"]["text"] for d in documents if d["type"] == "content_block_delta"]
        check(not any("\ufffd" in delta for delta in deltas), "a character was split")
        check_equal(json.loads("".join(deltas))["text"], text, "the text")


@row
async def ids_differ(server: Server) -> None:
    """No two messages have the same id."""
    ids = [(await server.message(max_tokens=1)).ok().json["id"] for _ in range(2)]
    check(ids[0] != ids[1], f"both messages are {ids[0]}")


@row
async def clients_fields_are_taken(server: Server) -> None:
    """metadata, service_tier, top_k, top_p and cache_control are accepted."""
    fields: dict[str, Any] = {"metadata": {"user_id": "u"}, "service_tier": "auto", "top_k": 5, "top_p": 0.9}
    block = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    (await server.message(messages=[{"role": "user", "content": [block]}], **fields)).ok()


@row
async def models_are_listed_for_its_clients(server: Server) -> None:
    """Who sends anthropic-version gets the list of models in Anthropic's shape."""
    answer = await server.get("/v1/models", headers=server.anthropic_headers, key=None)
    page = answer.ok().json
    if page.get("object") == "list":
        raise NotApplicable("models are listed in OpenAI's shape only")
    check_in(server.model, [entry["id"] for entry in page["data"]], "the model")
    for entry in page["data"]:
        check_equal(entry["type"], "model", "type of an entry")
        check(isinstance(entry["display_name"], str), f"display_name is {entry['display_name']!r}")
    found = (page["has_more"], page["first_id"], page["last_id"])
    check_equal(found[1:], (page["data"][0]["id"], page["data"][-1]["id"]), "first_id and last_id")
    check(isinstance(found[0], bool), f"has_more is {found[0]!r}")
