"""Server-sent events of chats, to the byte."""

from __future__ import annotations

import json
from typing import Any

from loadtest.conformance.answer import DONE, StreamedAnswer
from loadtest.conformance.check import NotApplicable, check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.rows.chat import stop_in
from loadtest.conformance.server import Server

MANY_SCRIPTS = "naïve – 日本語 – Ελλάδα – 🦜🏔️ – e\u0301"
MEASURABLE_S = 0.5
FEW_TOKENS, MANY_TOKENS = 200, 2000
LIKE_THE_END = "data: [DONE]"
LIKE_FRAMING = "x\n\nevent: error\ndata: {}\n\n: comment\r\rid: 1\u2028\u2029\x85end"


def form_of(text: str) -> dict[str, Any]:
    """A response_format that leaves the model no other choice than this text."""
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "enum": [text]}},
        "required": ["text"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "text", "strict": True, "schema": schema}}


async def check_arrives(server: Server, text: str) -> None:
    """The model is made to say the text: the pieces of a stream must add up to just that."""
    stream = (await server.chat_stream(max_tokens=512, response_format=form_of(text))).ok("response_format")
    if stream.finish_reasons[0] == ["length"]:
        raise NotApplicable("the model did not come to an end within 512 tokens")
    check("\ufffd" not in stream.texts[0], "a character was split")
    check_equal(json.loads(stream.texts[0])["text"], text, "the text")


@row
async def headers_are_those_of_events(server: Server) -> None:
    """Content-Type is text/event-stream, nothing is cached, and there is no length."""
    headers = (await server.chat_stream(max_tokens=2)).ok().answer.headers
    content_type = headers.get("content-type", "")
    check(content_type.startswith("text/event-stream"), f"content-type is {content_type!r}")
    check(
        "no-cache" in headers.get("cache-control", ""), f"cache-control is {headers.get('cache-control')!r}"
    )
    check("content-length" not in headers, "a stream has a content-length")


@row
async def the_first_chunk_has_the_role(server: Server) -> None:
    """The first chunk of each choice says `role: assistant`, and no later one another."""
    for chunks in (await server.chat_stream(n=2)).ok().choice_chunks.values():
        check_equal(chunks[0]["delta"].get("role"), "assistant", "the first chunk's role")


@row
async def chunks_share_their_head(server: Server) -> None:
    """All chunks have the same id, created and model, and are chat.completion.chunk."""
    heads = {
        (d["id"], d["created"], d["model"], d["object"]) for d in (await server.chat_stream()).ok().documents
    }
    check_equal(len(heads), 1, "the number of different heads")
    check_equal(heads.pop()[3], "chat.completion.chunk", "object")


@row
async def each_choice_ends_once(server: Server) -> None:
    """Each choice has one finish_reason, in its last chunk."""
    for chunks in (await server.chat_stream(n=2)).ok().choice_chunks.values():
        reasons = [chunk.get("finish_reason") for chunk in chunks]
        check_equal(sum(reason is not None for reason in reasons), 1, "the number of finish reasons")
        check(reasons[-1] is not None, "the finish reason is not in the last chunk")


@row
async def every_event_has_data(server: Server) -> None:
    """The official clients parse the data of every event, so none may be without."""
    events = (await server.chat_stream()).ok().events
    check(all(event.data for event in events), "an event without data")


@row
async def clients_that_read_lines_can_read_it(server: Server) -> None:
    """Simple clients split a stream by lines: each event is one line `data: …`, each other line a comment."""
    body = (await server.chat_stream()).ok().answer.body
    for line in filter(None, body.split(b"\n")):
        check(line.startswith((b"data: ", b":")) and b"\r" not in line, f"a line is {line[:80]!r}")


@row
async def it_ends_with_done(server: Server) -> None:
    """The last event is [DONE], and no other one is."""
    data = [event.data for event in (await server.chat_stream()).ok().events]
    check_equal((data[-1], data.count(DONE)), (DONE, 1), "the last event and the number of [DONE]")


@row
async def usage_comes_only_if_asked_for(server: Server) -> None:
    """Without include_usage no chunk has usage or is without choices."""
    for document in (await server.chat_stream()).ok().documents:
        check(document["choices"], "a chunk without choices")
        check_equal(document.get("usage"), None, "usage")


@row
async def usage_is_the_last_chunk(server: Server) -> None:
    """With include_usage the last chunk has usage and no choices; before it usage is null."""
    stream = await server.chat_stream(max_tokens=4, stream_options={"include_usage": True})
    *others, last = stream.ok("stream_options").documents
    check_equal(
        (last["choices"], last["usage"]["completion_tokens"]), ([], 4), "choices and tokens of the last"
    )
    check(all(each["choices"] and each.get("usage") is None for each in others), "usage comes early")


async def check_stream_is_whole(server: Server, **fields: Any) -> StreamedAnswer:
    whole = (await server.chat(**fields)).ok(next(iter(fields), None)).json["choices"]
    stream = (await server.chat_stream(**fields)).ok()
    for choice in whole:
        index = choice["index"]
        check_equal(
            stream.texts.get(index), choice["message"]["content"], f"the streamed text of choice {index}"
        )
        check_equal(stream.finish_reasons[index], [choice["finish_reason"]], "the finish reasons")
    check_equal(len(stream.texts), len(whole), "the number of choices")
    return stream


@row
async def a_greedy_stream_is_the_whole_answer(server: Server) -> None:
    """At temperature 0 the pieces add up to the whole answer."""
    await check_stream_is_whole(server)


@row
async def a_seeded_stream_is_the_whole_answer(server: Server) -> None:
    """With a seed the pieces add up to the whole answer."""
    await check_stream_is_whole(server, seed=5, temperature=0.9)


@row
async def choices_interleave_by_index(server: Server) -> None:
    """The chunks of n choices add up to the n whole answers, each by its index."""
    await check_stream_is_whole(server, n=3, seed=5, temperature=0.9)


@row
async def no_piece_of_a_stop_string_leaks(server: Server) -> None:
    """A stream holds back what may become a stop string."""
    text, stop = await stop_in(server)
    stream = (await server.chat_stream(max_tokens=48, stop=stop)).ok("stop")
    check_equal(stream.texts[0], text[: text.find(stop)], "the streamed text")


@row
async def log_probabilities_are_those_of_the_whole_answer(server: Server) -> None:
    """Entries of all chunks are those of the whole answer."""
    whole = (await server.chat(logprobs=True, top_logprobs=1)).ok("logprobs").json["choices"][0]["logprobs"]
    chunks = (await server.chat_stream(logprobs=True, top_logprobs=1)).ok().choice_chunks[0]
    streamed = [e["token"] for c in chunks if c.get("logprobs") for e in c["logprobs"]["content"]]
    check_equal(streamed, [entry["token"] for entry in whole["content"]], "the streamed tokens")


@row
async def characters_are_never_split(server: Server) -> None:
    """Characters of several bytes or tokens come whole, each in one event."""
    await check_arrives(server, MANY_SCRIPTS)


@row
async def text_like_the_end_arrives(server: Server) -> None:
    """A model may say `data: [DONE]`."""
    await check_arrives(server, LIKE_THE_END)


@row
async def text_like_framing_arrives(server: Server) -> None:
    """Line breaks and fields of the event stream's own are nothing but text inside."""
    await check_arrives(server, LIKE_FRAMING)


@row
async def it_begins_before_it_ends(server: Server) -> None:
    """Tokens are sent as they come, not all at the end."""
    room = (server.target.max_model_len or FEW_TOKENS) // 2
    for max_tokens in sorted({min(FEW_TOKENS, room), min(MANY_TOKENS, room)}):
        stream = (await server.chat_stream(max_tokens=max_tokens)).ok()
        if stream.last_byte_s >= MEASURABLE_S:
            check(stream.first_byte_s < 0.8 * stream.last_byte_s,
                  f"first byte after {stream.first_byte_s:.2f} s of {stream.last_byte_s:.2f} s")  # fmt: skip
            return
    raise NotApplicable(f"all was over in {stream.last_byte_s * 1000:.0f} ms, too quick to tell")


@row
async def what_is_refused_is_no_stream(server: Server) -> None:
    """What is wrong before the first token is an ordinary error with its status."""
    (await server.chat_stream(model="no-such-model")).answer.refused(404)
    (await server.chat_stream(temperature="hot")).answer.refused(400, param="temperature")
