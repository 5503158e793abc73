"""`/v1/responses`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.rows.streams import LIKE_FRAMING, LIKE_THE_END, MANY_SCRIPTS, form_of
from loadtest.conformance.rows.structured_output import FORMAT
from loadtest.conformance.server import QUESTION, Server

PATH = "/v1/responses"
POLL_INTERVAL_S = 0.05
INSTRUCTIONS = "Be brief, speak plainly, and say nothing that you do not know."


def body_of(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "input": QUESTION, "max_output_tokens": 24, "temperature": 0} | fields


async def create(server: Server, feature: str | None = None, **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = (await server.post(PATH, body_of(server, **fields))).ok(feature).json
    return document


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


@row
async def answer_has_the_shape(server: Server) -> None:
    """A response with a message of output_text, and usage that adds up."""
    response = await create(server)
    check_equal(response["object"], "response", "object")
    check_in(response["status"], ("completed", "incomplete"), "status")
    message = next(item for item in response["output"] if item["type"] == "message")
    check_equal(
        (message["role"], message["content"][0]["type"]), ("assistant", "output_text"), "role and type"
    )
    check_equal(message["content"][0]["annotations"], [], "annotations")
    usage = response["usage"]
    check_equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"], "total_tokens")


@row
async def input_may_be_a_list(server: Server) -> None:
    """A user's message as an item says what the string says."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    check_equal(text_of(await create(server, input=items)), text_of(await create(server)), "the text")


@row
async def instructions_are_read(server: Server) -> None:
    """instructions are a part of the prompt."""
    # Not against none at all: some chat templates have instructions of their own, which these replace.
    few, many = (
        await create(server, instructions="Be brief."),
        await create(server, instructions=INSTRUCTIONS),
    )
    check(many["usage"]["input_tokens"] > few["usage"]["input_tokens"], "the prompt is no longer with more")


@row
async def the_limit_leaves_it_incomplete(server: Server) -> None:
    """An answer that max_output_tokens cuts is incomplete, and says why."""
    response = await create(server, max_output_tokens=16)
    check_equal(response["status"], "incomplete", "status")
    check_equal(response["incomplete_details"], {"reason": "max_output_tokens"}, "incomplete_details")


@row
async def events_come_in_order(server: Server) -> None:
    """Numbered without a gap, named as their type, from response.created to the end."""
    stream = (await server.stream(PATH, body_of(server))).ok()
    types = [document["type"] for document in stream.documents]
    check_equal([event.name for event in stream.events][: len(types)], types, "the names of events")
    numbers = [document["sequence_number"] for document in stream.documents]
    check_equal(numbers, list(range(len(numbers))), "the sequence numbers")
    check_equal(types[0], "response.created", "the first event")
    check_in(types[-1], ("response.completed", "response.incomplete"), "the last event")
    order = ["response.created", "response.output_item.added", "response.content_part.added",
             "response.output_text.delta", "response.output_text.done", "response.content_part.done",
             "response.output_item.done", types[-1]]  # fmt: skip
    check_equal([each for each in dict.fromkeys(types) if each in order], order, "the order")


@row
async def deltas_add_up(server: Server) -> None:
    """Deltas are the text that `done` and the last event repeat, and that of the whole answer."""
    documents = (await server.stream(PATH, body_of(server))).ok().documents
    deltas = "".join(d["delta"] for d in documents if d["type"] == "response.output_text.delta")
    done = [d["text"] for d in documents if d["type"] == "response.output_text.done"]
    check_equal(done, [deltas], "the text of `done`")
    check_equal(text_of(documents[-1]["response"]), deltas, "the text of the last event")
    check_equal(text_of(await create(server)), deltas, "the text of the whole answer")


@row
async def it_can_be_retrieved_and_deleted(server: Server) -> None:
    """A response is kept under its id until it is deleted."""
    response = await create(server, store=True)
    path = f"{PATH}/{response['id']}"
    check_equal((await server.get(path)).ok().json["output"], response["output"], "the retrieved output")
    check_equal((await server.send("DELETE", path)).ok().json["deleted"], True, "deleted")
    check_equal((await server.get(path)).status, 404, "the status of a deleted one")


@row
async def its_input_can_be_listed(server: Server) -> None:
    """input_items has what the response was made from, as items with ids."""
    response = await create(server, store=True)
    document = (await server.get(f"{PATH}/{response['id']}/input_items")).ok().json
    check_equal(document["object"], "list", "object")
    (item,) = document["data"]
    check_equal(
        (item["type"], item["role"], item["content"][0]["text"]), ("message", "user", QUESTION), "the item"
    )
    check(item["id"], "the item has no id")


@row
async def what_has_ended_cannot_be_cancelled(server: Server) -> None:
    """Only what runs in the background can be: else it is a 400."""
    response = await create(server, store=True)
    (await server.post(f"{PATH}/{response['id']}/cancel", {})).refused(400)


@row
async def it_is_not_kept_against_the_will(server: Server) -> None:
    """store false: nothing can be retrieved."""
    response = await create(server, store=False)
    check_equal((await server.get(f"{PATH}/{response['id']}")).status, 404, "status")


@row
async def a_conversation_goes_on(server: Server) -> None:
    """previous_response_id puts the turns before into the prompt."""
    first = await create(server, store=True)
    next_one = await create(server, "previous_response_id", previous_response_id=first["id"], input="Go on.")
    check(next_one["usage"]["input_tokens"] > first["usage"]["input_tokens"], "the prompt has no history")


@row
async def a_conversation_may_be_sent_along(server: Server) -> None:
    """A response's output as input says what previous_response_id says."""
    first = await create(server, store=True)
    question, next_one = {"role": "user", "content": QUESTION}, {"role": "user", "content": "Go on."}
    by_id = await create(server, "previous_response_id", previous_response_id=first["id"], input=[next_one])
    by_items = await create(server, input=[question, *first["output"], next_one])
    check_equal(text_of(by_items), text_of(by_id), "the text")


@row
async def an_unknown_predecessor_is_refused(server: Server) -> None:
    """A previous_response_id that there is not is named."""
    await create(server)  # the route is there
    answer = await server.post(PATH, body_of(server, previous_response_id="resp_none"))
    check_in(answer.status, (400, 404), "status")
    check_equal(answer.error["param"], "previous_response_id", "param")


@row
async def a_form_is_kept(server: Server) -> None:
    """text.format json_schema."""
    form = {"type": "json_schema", **FORMAT["json_schema"]}  # type: ignore[dict-item]
    response = await create(server, "text", text={"format": form}, max_output_tokens=400)
    if response["status"] == "completed":
        check_equal(
            set(json.loads(text_of(response))), {"colour", "count", "is_new", "tags"}, "the set of fields"
        )


@row
async def hostile_text_arrives(server: Server) -> None:
    """Text that looks like the framing of a stream, or has characters of several bytes, comes whole."""
    for text in (LIKE_THE_END, LIKE_FRAMING, MANY_SCRIPTS):
        form = {"type": "json_schema", **form_of(text)["json_schema"]}
        body = body_of(server, text={"format": form}, max_output_tokens=512)
        documents = (await server.stream(PATH, body)).ok("text").documents
        if documents[-1]["type"] == "response.incomplete":
            raise NotApplicable("the model did not come to an end within 512 tokens")
        deltas = [d["delta"] for d in documents if d["type"] == "response.output_text.delta"]
        check(not any("\ufffd" in delta for delta in deltas), "a character was split")
        check_equal(json.loads("".join(deltas))["text"], text, "the text")


@row
async def log_probabilities_are_told(server: Server) -> None:
    """include message.output_text.logprobs: as many entries as tokens."""
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await create(server, "include", **fields)
    (part,) = next(item for item in response["output"] if item["type"] == "message")["content"]
    entries = part["logprobs"]
    check_equal(len(entries), response["usage"]["output_tokens"], "the number of entries")
    check(all(len(entry["top_logprobs"]) == 2 for entry in entries), "not the asked number of alternatives")


@row
async def metadata_come_back(server: Server) -> None:
    """A response holds the metadata that it was made with."""
    response = await create(server, "metadata", metadata={"a": "b"})
    check_equal(response["metadata"], {"a": "b"}, "metadata")


async def create_in_background(server: Server, **fields: Any) -> dict[str, Any]:
    response = await create(server, "background", background=True, store=True, **fields)
    check_equal(response["background"], True, "background")
    return response


async def ended(server: Server, response: dict[str, Any]) -> dict[str, Any]:
    """The response when nothing more comes of it."""
    while response["status"] in ("queued", "in_progress"):
        await asyncio.sleep(POLL_INTERVAL_S)
        response = (await server.get(f"{PATH}/{response['id']}")).ok().json
    return response


@row
async def a_response_may_be_made_in_the_background(server: Server) -> None:
    """background: an id at once, and under it, later, what would have been the answer."""
    response = await ended(server, await create_in_background(server))
    check_in(response["status"], ("completed", "incomplete"), "status")
    check_equal(text_of(response), text_of(await create(server)), "the text")


@row
async def the_background_can_be_cancelled(server: Server) -> None:
    """A response that is being made is cancelled, stays so, and may be cancelled twice."""
    room = (server.target.max_model_len or 2048) // 2
    path = f"{PATH}/{(await create_in_background(server, max_output_tokens=room))['id']}"
    first = await server.post(f"{path}/cancel", {})
    if first.status == 400 or first.ok().json["status"] in ("completed", "incomplete"):
        raise NotApplicable("it was over too soon")
    for answer in (first, await server.post(f"{path}/cancel", {}), await server.get(path)):
        check_equal(answer.ok().json["status"], "cancelled", "status")


@row
async def what_is_wrong_is_named(server: Server) -> None:
    """Wrong fields and unknown models are refused by the names that they have here."""
    await create(server)  # the route is there
    wrong = {"temperature": "hot", "max_output_tokens": 0, "input": 7, "max_tokens": 7, "frobnicate": 1}
    for param, value in wrong.items():
        (await server.post(PATH, body_of(server, **{param: value}))).refused(400, param=param)
    (await server.post(PATH, body_of(server, model="no-such-model"))).refused(404, code="model_not_found")


@row
async def unknown_ids_are_not_found(server: Server) -> None:
    """A response that there is not is a 404, to read as to delete."""
    await create(server)  # the route is there
    for method in ("GET", "DELETE"):
        answer = await server.send(method, f"{PATH}/resp_none")
        check_equal(answer.status, 404, f"the status of {method}")
        check(answer.error["message"], "an error without a message")


@row
async def an_input_is_required(server: Server) -> None:
    """A body without input is a 400."""
    (await server.post(PATH, {"model": server.model})).refused(400)
