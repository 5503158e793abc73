"""CORS: what a browser asks before, and wants to see after, a request of a web page (WHATWG Fetch)."""

from __future__ import annotations

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable, check, check_equal, check_in
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

CHAT = "/v1/chat/completions"


def names_in(value: str) -> set[str]:
    return {name.strip().lower() for name in value.split(",") if name.strip()}


def origin_of(server: Server) -> dict[str, str]:
    return {"Origin": server.target.origin}


async def preflight(server: Server, method: str = "POST", path: str = CHAT) -> Answer:
    """A browser's question. It never has a key."""
    asked = {
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return await server.send("OPTIONS", path, headers={**origin_of(server), **asked}, key=None)


def check_may_be_read(server: Server, answer: Answer, what: str) -> None:
    allowed = answer.headers.get("access-control-allow-origin")
    check_in(allowed, ("*", server.target.origin), f"the allowed origin of {what}")


async def allowing(server: Server) -> Answer:
    """The answer to a page's GET. Raises NotApplicable where pages of this origin are not let in."""
    answer = await server.get("/v1/models", headers=origin_of(server))
    if "access-control-allow-origin" not in answer.headers:
        raise NotApplicable(f"pages of {server.target.origin} are not let in (--origin)")
    return answer.ok()


@row
async def the_question_before_is_answered(server: Server) -> None:
    """A preflight without a key is 2xx, and allows the method and the headers of a chat."""
    await allowing(server)
    answer = await preflight(server)
    check(200 <= answer.status < 300, f"status {answer.status}: {answer.says}")
    check_may_be_read(server, answer, "a preflight")
    check_in("post", names_in(answer.headers.get("access-control-allow-methods", "")), "POST")
    # A star would not do: it never stands for Authorization.
    names = names_in(answer.headers.get("access-control-allow-headers", ""))
    check(names >= {"authorization", "content-type"}, f"the allowed headers are {sorted(names)}")


@row
async def a_page_may_delete(server: Server) -> None:
    """The methods of all routes are allowed: DELETE of a response, too."""
    await allowing(server)
    if (await server.get("/v1/responses/resp_none")).status in (405, 501):
        raise NotApplicable("there is no route that deletes")
    answer = await preflight(server, "DELETE", "/v1/responses/resp_none")
    check_in("delete", names_in(answer.headers.get("access-control-allow-methods", "")), "DELETE")


@row
async def whatever_comes_may_be_read(server: Server) -> None:
    """Lists, answers, streams and errors allow the origin: else a page could not read why it failed."""
    check_may_be_read(server, await allowing(server), "a list")
    for what, status, fields in (
        ("an answer", 200, {"max_tokens": 1}),
        ("a stream", 200, {"max_tokens": 1, "stream": True}),
        ("an error", 400, {"temperature": "hot"}),
    ):
        answer = await server.post(CHAT, server.chat_body(**fields), headers=origin_of(server))
        check_equal(answer.status, status, f"the status of {what}")
        check_may_be_read(server, answer, what)
    for what, path in (("an unknown route", "/v1/no-such-route"), ("an unknown model", "/v1/models/none")):
        check_may_be_read(server, await server.get(path, headers=origin_of(server)), what)


@row
async def a_refused_key_may_be_read(server: Server) -> None:
    """401 allows the origin, too."""
    await server.needs_keys()
    await allowing(server)
    answer = await server.get("/v1/models", headers=origin_of(server), key="wrong-key")
    check_may_be_read(server, answer, "a 401")


@row
async def the_request_id_is_exposed(server: Server) -> None:
    """Access-Control-Expose-Headers has x-request-id, without which a page could not report a fault."""
    exposed = names_in((await allowing(server)).headers.get("access-control-expose-headers", ""))
    check(exposed & {"x-request-id", "*"}, f"exposed is {sorted(exposed)}")


@row
async def caches_keep_origins_apart(server: Server) -> None:
    """An answer that names an origin varies by it, and one that names none allows no credentials."""
    headers = (await allowing(server)).headers
    if headers["access-control-allow-origin"] == "*":
        allowed = headers.get("access-control-allow-credentials")
        check_equal(allowed, None, "access-control-allow-credentials beside a star")
    else:
        check_in("origin", names_in(headers.get("vary", "")), "Origin in Vary")
