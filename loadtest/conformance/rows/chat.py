"""`POST /v1/chat/completions`, whole answers."""

from __future__ import annotations

import time
from typing import Any

from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.server import QUESTION, Server

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


async def content_of(server: Server, **fields: Any) -> str:
    document = (await server.chat(**fields)).ok().json
    return str(document["choices"][0]["message"]["content"])


async def stop_in(server: Server) -> tuple[str, str]:
    """A greedy answer, and a piece from within it."""
    text = await content_of(server, max_tokens=48)
    if len(text) < 16:
        raise NotApplicable(f"the model says too little to cut a stop string from: {text!r}")
    return text, text[len(text) // 2 :][:4]


@row
async def answer_has_the_shape(server: Server) -> None:
    """Id, object, created, model and one choice with the assistant's message."""
    document = (await server.chat()).ok().json
    check_equal(document["object"], "chat.completion", "object")
    check(isinstance(document["id"], str) and document["id"], "there is no id")
    check(abs(document["created"] - time.time()) < 86_400, f"created is {document['created']!r}")
    check(isinstance(document["model"], str), f"model is {document['model']!r}")
    (choice,) = document["choices"]
    check_equal((choice["index"], choice["message"]["role"]), (0, "assistant"), "index and role")
    check(isinstance(choice["message"]["content"], str), "content is no text")
    check_in(choice["finish_reason"], ("stop", "length"), "finish_reason")


@row
async def ids_differ(server: Server) -> None:
    """No two answers have the same id."""
    ids = [(await server.chat(max_tokens=1)).ok().json["id"] for _ in range(2)]
    check(ids[0] != ids[1], f"both answers are {ids[0]}")


@row
async def usage_adds_up(server: Server) -> None:
    """total_tokens is the sum of prompt_tokens and completion_tokens, none of which is 0."""
    usage = (await server.chat()).ok().json["usage"]
    check(usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0, f"usage is {usage}")
    check_equal(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")


@row
async def max_tokens_ends_with_length(server: Server) -> None:
    """An answer that is cut by max_tokens has so many tokens, and says `length`."""
    document = (await server.chat(max_tokens=4)).ok().json
    found = (document["choices"][0]["finish_reason"], document["usage"]["completion_tokens"])
    check_equal(found, ("length", 4), "finish_reason and completion_tokens")


@row
async def max_completion_tokens_is_the_newer_name(server: Server) -> None:
    """max_completion_tokens cuts as max_tokens does."""
    body = server.chat_body(max_completion_tokens=4)
    del body["max_tokens"]
    document = (await server.post("/v1/chat/completions", body)).ok("max_completion_tokens").json
    found = (document["choices"][0]["finish_reason"], document["usage"]["completion_tokens"])
    check_equal(found, ("length", 4), "finish_reason and completion_tokens")


@row
async def a_seed_repeats_a_sample(server: Server) -> None:
    """The same seed gives the same answer at temperature 0.9."""
    fields = {"temperature": 0.9, "seed": 77}
    check_equal(await content_of(server, **fields), await content_of(server, **fields), "the second answer")


@row
async def n_gives_as_many_choices(server: Server) -> None:
    """n choices come in order, and usage counts the tokens of all."""
    document = (await server.chat(n=3, temperature=0.9, max_tokens=4)).ok("n").json
    check_equal([choice["index"] for choice in document["choices"]], [0, 1, 2], "the indices")
    check_equal(document["usage"]["completion_tokens"], 12, "completion_tokens")


@row
async def a_stop_string_ends_the_answer(server: Server) -> None:
    """The answer ends before the stop string, and says `stop`."""
    text, stop = await stop_in(server)
    choice = (await server.chat(max_tokens=48, stop=stop)).ok("stop").json["choices"][0]
    check_equal(choice["message"]["content"], text[: text.find(stop)], "the content")
    check_equal(choice["finish_reason"], "stop", "finish_reason")


@row
async def the_first_of_several_stop_strings_counts(server: Server) -> None:
    """Of a list of stop strings, the one that comes first ends the answer."""
    text, stop = await stop_in(server)
    choice = (
        (await server.chat(max_tokens=48, stop=["\x00never", text[-4:], stop])).ok("stop").json["choices"][0]
    )
    first = min(text.find(stop), text.find(text[-4:]))
    check_equal(choice["message"]["content"], text[:first], "the content")


@row
async def text_parts_are_a_text(server: Server) -> None:
    """Content in text parts means what the joined string means."""
    half = len(QUESTION) // 2
    parts = [{"type": "text", "text": QUESTION[:half]}, {"type": "text", "text": QUESTION[half:]}]
    joined = (await server.chat(messages=[{"role": "user", "content": QUESTION}])).ok().json
    parted = (await server.chat(messages=[{"role": "user", "content": parts[:1]}])).ok().json
    whole = (
        await server.chat(messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}])
    ).ok()
    check_equal(whole.json["choices"][0]["message"], joined["choices"][0]["message"], "the message")
    check(parted["usage"]["prompt_tokens"] < joined["usage"]["prompt_tokens"], "half a prompt is as long")
    (await server.chat(messages=[{"role": "user", "content": parts}])).ok()


@row
async def images_are_seen_or_refused(server: Server) -> None:
    """Who sees no images refuses them, and names where they are; another one's prompt grows by them."""
    text = {"type": "text", "text": "What is it?"}
    content = [text, {"type": "image_url", "image_url": {"url": PIXEL}}]
    answer = await server.chat(messages=[{"role": "user", "content": content}], max_tokens=1)
    if answer.status == 200:
        alone = (await server.chat(messages=[{"role": "user", "content": [text]}], max_tokens=1)).ok()
        lengths = [each.json["usage"]["prompt_tokens"] for each in (alone, answer)]
        check(
            lengths[0] < lengths[1], f"prompts of {lengths[0]} and {lengths[1]} tokens: the image is dropped"
        )
    else:
        answer.refused(400, param="messages")


@row
async def all_roles_are_taken(server: Server) -> None:
    """system, developer, user and assistant messages make a conversation."""
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", QUESTION)]
    for role in ("system", "developer"):
        messages = [{"role": name, "content": text} for name, text in ((role, "Be brief."), *turns)]
        (await server.chat(messages=messages)).ok()


@row
async def log_probabilities_have_the_shape(server: Server) -> None:
    """Every token has its text, bytes, log-probability and as many alternatives as asked for."""
    document = (await server.chat(logprobs=True, top_logprobs=2)).ok("logprobs").json
    choice = document["choices"][0]
    entries = choice["logprobs"]["content"]
    check_equal(len(entries), document["usage"]["completion_tokens"], "the number of entries")
    for entry in entries:
        check(entry["logprob"] <= 0, f"logprob is {entry['logprob']}")
        check_equal(len(entry["top_logprobs"]), 2, "the number of alternatives")
        for one in (entry, *entry["top_logprobs"]):
            check(set(one) >= {"token", "logprob", "bytes"}, f"an entry has only {sorted(one)}")
    spelled = b"".join(bytes(entry["bytes"] or ()) for entry in entries).decode(errors="replace")
    check(spelled.startswith(choice["message"]["content"]), "the tokens are not the content")


@row
async def log_probabilities_come_only_if_asked_for(server: Server) -> None:
    """Without logprobs a choice has none."""
    choice = (await server.chat()).ok().json["choices"][0]
    check_equal(choice.get("logprobs"), None, "logprobs")


@row
async def null_means_the_default(server: Server) -> None:
    """Clients write null for what they leave to the server."""
    names = ("stop", "n", "top_p", "tools", "logprobs", "response_format", "user", "stream", "stream_options")
    (await server.chat(**dict.fromkeys(names))).ok()


@row
async def bookkeeping_fields_are_taken(server: Server) -> None:
    """user, metadata, store, service_tier and safety_identifier are accepted."""
    fields: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
    }  # fmt: skip
    (await server.chat(**fields)).ok()


@row
async def system_fingerprint_is_a_text(server: Server) -> None:
    """system_fingerprint, where there is one, is a string."""
    fingerprint = (await server.chat(max_tokens=1)).ok().json.get("system_fingerprint")
    if fingerprint is None:
        raise NotApplicable("answers have no system_fingerprint")
    check(isinstance(fingerprint, str), f"it is {fingerprint!r}")


@row
async def thoughts_are_told_apart(server: Server) -> None:
    """What a model marks as its thoughts is reasoning_content, whole and streamed, and no part of content."""
    fields = {"messages": [{"role": "user", "content": "What is 17 times 3?"}], "max_tokens": 256}
    message = (await server.chat(**fields)).ok().json["choices"][0]["message"]
    thoughts = message.get("reasoning_content")
    check("<think>" not in (message["content"] or ""), "thoughts are in the content")
    if not thoughts:
        raise NotApplicable("the model does not think")
    chunks = (await server.chat_stream(**fields)).ok().choice_chunks[0]
    streamed = "".join(chunk["delta"].get("reasoning_content") or "" for chunk in chunks)
    check_equal(streamed, thoughts, "the streamed thoughts")


@row
async def an_effort_to_reason_is_taken(server: Server) -> None:
    """reasoning_effort is accepted, and one that does not exist is a 400 of it."""
    (await server.chat(reasoning_effort="low", max_tokens=4)).ok("reasoning_effort")
    (await server.chat(reasoning_effort="titanic")).refused(400, param="reasoning_effort")


@row
async def a_priority_is_for_those_who_may(server: Server) -> None:
    """vLLM's priority: 0 is for all; another one is taken, or refused by its name."""
    (await server.chat(priority=0, max_tokens=1)).ok("priority")
    answer = await server.chat(priority=1, max_tokens=1)
    if answer.status != 200:
        answer.refused(403 if answer.status == 403 else 400, param="priority")
