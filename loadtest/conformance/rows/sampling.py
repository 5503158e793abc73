"""Fields that steer how tokens are drawn: OpenAI's, and vLLM's beside them."""

from __future__ import annotations

import secrets
from typing import Any

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.rows.chat import content_of, stop_in
from loadtest.conformance.server import Server

SEEDS = (101, 102)


async def check_greedy(server: Server, feature: str, value: float) -> None:
    """Hot and with whatever seed, this field leaves only the likeliest token."""
    greedy = await content_of(server)
    for seed in SEEDS:
        answer = await server.chat(**{"temperature": 1, "seed": seed, feature: value})
        content = answer.ok(feature).json["choices"][0]["message"]["content"]
        check_equal(content, greedy, f"the content with seed {seed}")


async def token_ids_of(server: Server, **fields: Any) -> list[int]:
    """Of a greedy completion."""
    choice = (
        (await server.complete(return_token_ids=True, **fields)).ok("return_token_ids").json["choices"][0]
    )
    if "token_ids" not in choice:
        raise NotApplicable("choices have no token_ids")
    token_ids: list[int] = choice["token_ids"]
    return token_ids


def text_of(answer: Answer, feature: str) -> str:
    return str(answer.ok(feature).json["choices"][0]["text"])


@row
async def a_narrow_top_p_is_greedy(server: Server) -> None:
    """top_p of nearly 0 leaves the likeliest token only."""
    await check_greedy(server, "top_p", 1e-6)


@row
async def a_top_k_of_one_is_greedy(server: Server) -> None:
    """vLLM's top_k: of one token."""
    await check_greedy(server, "top_k", 1)


@row
async def a_min_p_of_one_is_greedy(server: Server) -> None:
    """vLLM's min_p: tokens at least as likely as the likeliest."""
    await check_greedy(server, "min_p", 1)


@row
async def seeds_differ(server: Server) -> None:
    """Other seeds give other answers at temperature 1.5."""
    texts = {await content_of(server, temperature=1.5, seed=seed, max_tokens=32) for seed in range(4)}
    check(len(texts) > 1, f"four seeds give {texts}")


@row
async def a_bias_forces_a_token(server: Server) -> None:
    """logit_bias 100 makes a token the only one."""
    answer = await server.complete(logit_bias={"40": 100}, max_tokens=4)
    forced = text_of(answer, "logit_bias")
    other = text_of(await server.complete(logit_bias={"41": 100}, max_tokens=4), "logit_bias")
    check_equal(forced, forced[: len(forced) // 4] * 4, "the text of one token four times")
    check(forced != other, f"two tokens are both {forced!r}")


@row
async def a_bias_bars_a_token(server: Server) -> None:
    """logit_bias -100 keeps a token out."""
    first = (await token_ids_of(server))[0]
    token_ids = await token_ids_of(server, logit_bias={str(first): -100})
    check(first not in token_ids, f"token {first} is in {token_ids}")


@row
async def a_bias_of_no_token_is_refused(server: Server) -> None:
    """A key of logit_bias that is no token, or a bias beyond 100, is a 400 of logit_bias."""
    (await server.chat(logit_bias={"40": 1}, max_tokens=1)).ok("logit_bias")
    for bias in ({"x": 1}, {str(2**40): 1}, {"40": 101}, {"40": "much"}):
        (await server.chat(logit_bias=bias)).refused(400, param="logit_bias")


@row
async def penalties_out_of_range_are_named(server: Server) -> None:
    """Penalties beyond 2 are a 400 of their field."""
    for name in ("presence_penalty", "frequency_penalty"):
        (await server.chat(**{name: 1.5, "max_tokens": 1})).ok(name)
        for value in (2.5, -2.5):
            (await server.chat(**{name: value})).refused(400, param=name)


@row
async def a_penalty_breaks_a_repetition(server: Server) -> None:
    """Where a bias makes one of two tokens certain, frequency_penalty lets the other one in."""
    fields = {"logit_bias": {"40": 100, "41": 90}, "max_tokens": 40}
    without = text_of(await server.complete(**fields), "logit_bias")
    if without != without[: len(without) // 40] * 40:
        raise NotApplicable("a bias does not make a token certain here")
    punished = text_of(await server.complete(**fields, frequency_penalty=2), "frequency_penalty")
    check(punished != without, f"it is {without!r} all the same")


@row
async def token_ids_are_told(server: Server) -> None:
    """vLLM's return_token_ids: as many as usage counts, of the prompt and of the answer."""
    answer = (await server.chat(return_token_ids=True)).ok("return_token_ids").json
    choice, usage = answer["choices"][0], answer["usage"]
    if "token_ids" not in choice:
        raise NotApplicable("choices have no token_ids")
    check_equal(len(choice["token_ids"]), usage["completion_tokens"], "the number of token_ids")
    check_equal(len(answer["prompt_token_ids"]), usage["prompt_tokens"], "the number of prompt_token_ids")


@row
async def a_stop_token_ends_the_answer(server: Server) -> None:
    """vLLM's stop_token_ids: the answer ends with that token, and stop_reason says which it was."""
    token_ids = await token_ids_of(server)
    stop = token_ids[len(token_ids) // 2]
    answer = await server.complete(stop_token_ids=[stop], return_token_ids=True)
    choice = answer.ok("stop_token_ids").json["choices"][0]
    check_equal(choice["token_ids"], token_ids[: token_ids.index(stop) + 1], "token_ids")
    check_equal((choice["finish_reason"], choice["stop_reason"]), ("stop", stop), "what stopped it")


@row
async def a_stop_string_is_told(server: Server) -> None:
    """vLLM's stop_reason: the stop string that ended the answer, and null where none did."""
    text, stop = await stop_in(server)
    choice = (await server.chat(max_tokens=48, stop=[stop, "\x00never"])).ok("stop").json["choices"][0]
    if "stop_reason" not in choice:
        raise NotApplicable("choices have no stop_reason")
    expected = min((stop, "\x00never"), key=lambda each: text.find(each) % 2**31)
    check_equal(choice["stop_reason"], expected, "stop_reason")
    cut = (await server.chat(max_tokens=2)).ok().json["choices"][0]
    check_equal(cut["stop_reason"], None, "stop_reason of what was cut")


@row
async def a_stop_string_may_be_kept(server: Server) -> None:
    """vLLM's include_stop_str_in_output leaves the stop string in the text."""
    text, stop = await stop_in(server)
    answer = await server.chat(max_tokens=48, stop=stop, include_stop_str_in_output=True)
    content = answer.ok("include_stop_str_in_output").json["choices"][0]["message"]["content"]
    check_equal(content, text[: text.find(stop) + len(stop)], "the content")


@row
async def stops_wait_for_min_tokens(server: Server) -> None:
    """vLLM's min_tokens: nothing stops an answer before."""
    token_ids = await token_ids_of(server)
    answer = await server.complete(
        stop_token_ids=[token_ids[0]], min_tokens=6, max_tokens=12, return_token_ids=True
    )
    choice = answer.ok("min_tokens").json["choices"][0]
    check(len(choice["token_ids"]) >= 6, f"it stopped after {len(choice['token_ids'])} tokens")


@row
async def only_allowed_tokens_are_drawn(server: Server) -> None:
    """vLLM's allowed_token_ids: no other ones."""
    await token_ids_of(server)
    answer = await server.complete(allowed_token_ids=[40, 41], return_token_ids=True)
    token_ids = answer.ok("allowed_token_ids").json["choices"][0]["token_ids"]
    check(set(token_ids) <= {40, 41}, f"token_ids are {token_ids}")


@row
async def no_turn_of_the_assistants_on_request(server: Server) -> None:
    """vLLM's add_generation_prompt false leaves out the begin of the assistant's turn."""
    lengths = []
    for asked in (True, False):
        answer = (await server.chat(add_generation_prompt=asked, max_tokens=1)).ok("add_generation_prompt")
        lengths.append(answer.json["usage"]["prompt_tokens"])
    if lengths[0] == lengths[1]:
        raise NotApplicable("this model's turns begin with nothing, or the field is dropped")
    check(lengths[1] < lengths[0], f"the prompt grows from {lengths[0]} to {lengths[1]} tokens")


@row
async def a_final_message_is_continued(server: Server) -> None:
    """vLLM's continue_final_message: the assistant's words are not closed."""
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    fields: dict[str, Any] = {"messages": turns, "max_tokens": 4, "add_generation_prompt": False}
    continued = await server.chat(**fields, continue_final_message=True)
    length = continued.ok("continue_final_message").json["usage"]["prompt_tokens"]
    closed = (await server.chat(**fields)).ok("add_generation_prompt").json["usage"]["prompt_tokens"]
    check(length < closed, f"the prompt has {length} tokens, and {closed} with the end of a turn")


@row
async def template_variables_are_taken(server: Server) -> None:
    """vLLM's chat_template_kwargs reach the template; they must not replace the messages."""
    known = await server.chat(chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
    known.ok("chat_template_kwargs")
    fewer = await server.chat(chat_template_kwargs={"messages": []}, max_tokens=1)
    if fewer.status != 200:
        fewer.refused(400, param="chat_template_kwargs")
        return
    usage = (await server.chat(max_tokens=1)).ok().json["usage"]
    check_equal(fewer.json["usage"]["prompt_tokens"], usage["prompt_tokens"], "prompt_tokens")


@row
async def prompt_log_probabilities_are_told(server: Server) -> None:
    """vLLM's prompt_logprobs: one entry for each token of the prompt, of which the first is null."""
    answer = (await server.complete(prompt_logprobs=1, max_tokens=1)).ok("prompt_logprobs").json
    choice = answer["choices"][0]
    entries = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
    if entries is None:
        raise NotApplicable("answers have no prompt_logprobs")
    check_equal(len(entries), answer["usage"]["prompt_tokens"], "the number of entries")
    check_equal(entries[0], None, "the first entry")
    check(all(each["logprob"] <= 0 for entry in entries[1:] for each in entry.values()), "one is above 0")


@row
async def a_salt_keeps_caches_apart(server: Server) -> None:
    """vLLM's cache_salt: what one salt has cached another one does not find."""
    once = f"A text that nobody has asked for before: {secrets.token_hex(8)}. "
    messages = [{"role": "user", "content": once * 8}]

    async def cached(salt: str) -> int:
        answer = await server.chat(messages=messages, cache_salt=salt, max_tokens=1)
        details = answer.ok("cache_salt").json["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    first, again, other = [await cached(salt) for salt in ("one", "one", "other")]
    if again <= first:
        raise NotApplicable("no answer says that it read from a cache")
    check(other < again, f"{other} tokens were found under another salt")
