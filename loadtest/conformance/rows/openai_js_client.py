"""OpenAI's JavaScript client, unchanged: what it makes of answers (`openai_client.mjs`)."""

from __future__ import annotations

from loadtest.conformance.node import run_case
from loadtest.conformance.row import row
from loadtest.conformance.rows.embeddings import TEXTS, vectors_of
from loadtest.conformance.server import Server

CHAT = "/v1/chat/completions"


@row
async def a_chat_is_streamed_as_it_is_whole(server: Server) -> None:
    """The chunks of create with stream add up to what create gives: text, finish_reason and usage."""
    await run_case(server, "a chat", CHAT)


@row
async def its_stream_helper_comes_to_the_whole_answer(server: Server) -> None:
    """chat.completions.stream: content events add up to the final completion, which is the whole answer."""
    await run_case(server, "the stream helper", CHAT)


@row
async def a_forced_call_is_parsed(server: Server) -> None:
    """Of a call that is demanded, parse and the stream helper give the arguments, and the same."""
    await run_case(server, "a forced call", CHAT, "tool")


@row
async def a_zod_form_is_parsed(server: Server) -> None:
    """chat.completions.parse and the stream helper give an object of the asked zod schema, and the same."""
    await run_case(server, "a zod form", CHAT, "response_format")


@row
async def a_response_is_streamed_as_it_is_whole(server: Server) -> None:
    """The deltas of responses.stream add up to its final response, which is what create gives."""
    await run_case(server, "a response", "/v1/responses")


@row
async def vectors_are_read_in_both_encodings(server: Server) -> None:
    """embeddings.create gives the same numbers by base64, which it asks for by itself, and by float."""
    await vectors_of(server, TEXTS)  # it makes some
    await run_case(server, "vectors", "/v1/embeddings")


@row
async def models_and_refusals_are_told(server: Server) -> None:
    """models.list and retrieve have the model; refusals are errors of their kind, with param and code."""
    await run_case(server, "models and refusals", "/v1/models/")
