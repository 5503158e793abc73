"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from loadtest.conformance.answer import DONE
from loadtest.conformance.check import check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.rows.streams import LIKE_FRAMING, LIKE_THE_END, MANY_SCRIPTS
from loadtest.conformance.server import Server

IDS = [40, 41, 42, 43]  # in every vocabulary


@row
async def answer_has_the_shape(server: Server) -> None:
    """A text_completion with text, finish_reason and usage."""
    document = (await server.complete()).ok().json
    check_equal(document["object"], "text_completion", "object")
    (choice,) = document["choices"]
    check(isinstance(choice["text"], str), "text is no string")
    usage = document["usage"]
    check_equal(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")


@row
async def a_stream_is_the_whole_answer(server: Server) -> None:
    """The pieces add up to the whole text, and [DONE] is the last event."""
    whole = (await server.complete()).ok().json["choices"][0]
    stream = (await server.complete_stream()).ok()
    check_equal(stream.texts, {0: whole["text"]}, "the streamed text")
    check_equal(stream.events[-1].data, DONE, "the last event")


@row
async def sixteen_tokens_are_the_default(server: Server) -> None:
    """Without max_tokens an answer has at most 16 tokens."""
    body = server.completion_body()
    del body["max_tokens"]
    document = (await server.post("/v1/completions", body)).ok().json
    check(document["usage"]["completion_tokens"] <= 16, f"usage is {document['usage']}")


@row
async def several_prompts_are_answered_in_order(server: Server) -> None:
    """Each prompt of a list gets what it gets alone, n choices each."""
    together = (await server.complete(prompt=["One", "Two two"])).ok().json["choices"]
    check_equal([choice["index"] for choice in together], [0, 1], "the indices")
    for choice, prompt in zip(together, ("One", "Two two"), strict=True):
        alone = (await server.complete(prompt=prompt)).ok().json["choices"][0]
        check_equal(choice["text"], alone["text"], f"the text of {prompt!r}")


@row
async def choices_of_a_prompt_stand_together(server: Server) -> None:
    """With several prompts and n, the index is that of the prompt times n, plus that of the choice."""
    choices = (await server.complete(prompt=["One", "Two two"], n=2, max_tokens=4)).ok("n").json["choices"]
    check_equal([choice["index"] for choice in choices], [0, 1, 2, 3], "the indices")
    check_equal(choices[0]["text"], choices[1]["text"], "the second greedy choice of the first prompt")


@row
async def a_prompt_may_be_token_ids(server: Server) -> None:
    """A list of integers is one prompt of so many tokens."""
    document = (await server.complete(prompt=IDS)).ok().json
    check_equal(document["usage"]["prompt_tokens"], len(IDS), "prompt_tokens")


@row
async def prompts_may_be_lists_of_token_ids(server: Server) -> None:
    """A list of lists of integers is several prompts."""
    together = (await server.complete(prompt=[IDS, IDS[:2]])).ok().json
    alone = (await server.complete(prompt=IDS[:2])).ok().json
    check_equal(together["usage"]["prompt_tokens"], 6, "prompt_tokens")
    check_equal(together["choices"][1]["text"], alone["choices"][0]["text"], "the second text")


@row
async def echo_begins_with_the_prompt(server: Server) -> None:
    """With echo the text begins with the prompt, whatever it looks like."""
    for prompt in ("Once upon a time", LIKE_THE_END, LIKE_FRAMING, MANY_SCRIPTS):
        text = (await server.complete(prompt=prompt, echo=True)).ok("echo").json["choices"][0]["text"]
        check_equal(text[: len(prompt)], prompt, "the begin of the text")


@row
async def echo_arrives_in_a_stream(server: Server) -> None:
    """A stream with echo carries text that looks like its own framing."""
    for prompt in (LIKE_THE_END, LIKE_FRAMING, MANY_SCRIPTS):
        text = (await server.complete_stream(prompt=prompt, echo=True)).ok("echo").texts[0]
        check_equal(text[: len(prompt)], prompt, "the begin of the text")


@row
async def a_prompt_can_be_scored(server: Server) -> None:
    """echo, logprobs and max_tokens 0: the prompt's own log-probabilities, the first of which is null."""
    answer = (await server.complete(echo=True, logprobs=1, max_tokens=0)).ok()
    scores = answer.json["choices"][0]["logprobs"]
    check_equal(scores["token_logprobs"][0], None, "the first log-probability")
    check(all(score <= 0 for score in scores["token_logprobs"][1:]), "a log-probability above 0")
    check_equal("".join(scores["tokens"]), "Once upon a time", "the tokens")


@row
async def log_probabilities_have_the_shape(server: Server) -> None:
    """Four lists of equal length; offsets point into the text."""
    choice = (await server.complete(logprobs=2)).ok("logprobs").json["choices"][0]
    scores = choice["logprobs"]
    lengths = {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    check_equal(len(lengths), 1, "the number of different lengths")
    check(scores["text_offset"] == sorted(scores["text_offset"]), "text_offset falls")
    for top in scores["top_logprobs"]:
        few = 1 if any("\ufffd" in text for text in top) else 2  # parts of characters may have one name
        check(few <= len(top) <= 3, f"alternatives are {top}")


@row
async def a_suffix_is_heeded_or_refused(server: Server) -> None:
    """A server that cannot fill in refuses suffix by its name; another one's prompt grows by it."""
    answer = await server.complete(suffix="The end, and no more to be told of it.")
    if answer.status == 200:
        lengths = [each.json["usage"]["prompt_tokens"] for each in ((await server.complete()).ok(), answer)]
        check(lengths[0] < lengths[1], f"prompts of {lengths[0]} and {lengths[1]} tokens: it is dropped")
    else:
        answer.refused(400, param="suffix")


@row
async def a_prompt_is_required(server: Server) -> None:
    """A body without prompt is refused, and says so."""
    (await server.post("/v1/completions", {"model": server.model})).refused(400, param="prompt")


@row
async def a_mixed_prompt_is_refused(server: Server) -> None:
    """Lists of texts and ids, and lists that are empty, are a 400 of prompt."""
    prompts: list[Any] = [["a", 40], [40, "a"], [[40], "a"], [], [[]], 7]
    for prompt in prompts:
        (await server.complete(prompt=prompt)).refused(400, param="prompt")


@row
async def a_token_that_is_none_is_refused(server: Server) -> None:
    """A prompt of ids that the vocabulary does not have is a 400 of prompt."""
    for token in (2**31 - 1, -1):
        (await server.complete(prompt=[40, token])).refused(400, param="prompt")
