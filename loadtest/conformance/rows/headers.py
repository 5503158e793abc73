"""Headers of requests and answers."""

from __future__ import annotations

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import check, check_equal
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

HOSTILE = ("x" * 5000, "<script>alert(1)</script>", "a b\tc", "\";'--", "\u00e9\u00ff")


def id_of(answer: Answer) -> str:
    given = answer.headers.get("x-request-id", "")
    check(given, "there is no x-request-id")
    return given


@row
async def every_answer_has_a_request_id(server: Server) -> None:
    """x-request-id is on lists, answers, streams and errors, and never the same."""
    answers = [
        await server.get("/v1/models"),
        await server.chat(max_tokens=1),
        (await server.chat_stream(max_tokens=1)).answer,
        await server.chat(model="no-such-model"),
        await server.get("/v1/no-such-route"),
    ]
    check_equal(len({id_of(answer) for answer in answers}), len(answers), "the number of different ids")


@row
async def a_request_id_is_echoed(server: Server) -> None:
    """A client's own x-request-id comes back, on answers, streams and errors."""
    headers = {"x-request-id": "abc-123.DEF_4"}
    for fields in ({"max_tokens": 1}, {"max_tokens": 1, "stream": True}, {"temperature": "hot"}):
        answer = await server.post("/v1/chat/completions", server.chat_body(**fields), headers=headers)
        check_equal(id_of(answer), "abc-123.DEF_4", "x-request-id")


@row
async def a_hostile_request_id_is_not_echoed(server: Server) -> None:
    """Ids that are too long or of odd characters are replaced; the request is answered all the same."""
    for hostile in HOSTILE:
        raw = server.raw_request("GET", "/v1/models", headers={"x-request-id": "\0", "Connection": "close"})
        async with server.connection() as connection:
            await connection.send(raw.replace(b"\0", hostile.encode("latin-1")))
            answer = await connection.read_answer("/v1/models")
        answer.ok()
        check(id_of(answer) != hostile, f"{hostile[:20]!r} came back")


@row
async def the_scheme_may_be_in_any_case(server: Server) -> None:
    """`bearer` is `Bearer` (RFC 9110, 11.1)."""
    headers = {"Authorization": f"bearer {server.target.key}"} if server.target.key else {}
    (await server.get("/v1/models", headers=headers, key=None)).ok()


@row
async def a_charset_may_be_named(server: Server) -> None:
    """`application/json; charset=utf-8` is JSON."""
    headers = {"Content-Type": "application/json; charset=utf-8"}
    (await server.post("/v1/chat/completions", server.chat_body(max_tokens=1), headers=headers)).ok()
