"""Rows that need a client library: without it they do not apply, and say what to install."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import psutil
import pytest

from loadtest.conformance.check import NotApplicable
from loadtest.conformance.client_library import client_library
from loadtest.conformance.node import run_case
from loadtest.conformance.server import Server, open_server
from loadtest.conformance.suite import Outcome, all_rows, run_rows, select_rows
from tests.conformance.right_server import FAKE, NODE_MODULES, RightServer
from tests.conformance.wrong_server import Fault, Memory, RelayedAnswer, wrong_server
from tests.stack import wait_until

JS_CHAT = "openai-js-client.a-chat-is-streamed-as-it-is-whole"


async def reason_of(server: Server, name: str) -> str:
    """Why this row does not apply."""
    [result] = [result async for result in run_rows(server, select_rows(names=[name]), timeout_s=30)]
    assert result.outcome is Outcome.NOT_APPLICABLE
    return result.reason


def test_the_suite_itself_imports_no_client() -> None:
    """Not at its start, at least: a machine without them, such as the gateway's container, has the others."""
    code = "import sys; from loadtest.conformance.suite import all_rows; print(len(all_rows()), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_rows, *modules = done.stdout.split()
    assert int(num_rows) == len(all_rows())
    assert not {"openai", "anthropic"} & set(modules)


@pytest.mark.parametrize(
    ("name", "oldest", "words"),
    [
        ("no-such-client", (0, 0), "pip install no-such-client"),
        ("openai", (1000, 0), "is too old: pip install --upgrade openai"),
        ("headrace", (0, 0), "cannot be imported"),  # a distribution without a module of its name
    ],
)
async def test_a_library_that_is_missing_or_too_old_is_told(name, oldest, words) -> None:
    with pytest.raises(NotApplicable, match=words):
        await client_library(name, oldest)


async def test_a_package_that_is_missing_is_told(right_server, tmp_path, monkeypatch) -> None:
    async with open_server(
        right_server.url, key=right_server.key, model=FAKE, node_modules=tmp_path
    ) as server:
        assert f"not in {tmp_path}: npm install openai zod" in await reason_of(server, JS_CHAT)
    monkeypatch.chdir(tmp_path)
    async with open_server(right_server.url, key=right_server.key, model=FAKE) as server:
        assert "npm install openai zod" in await reason_of(server, JS_CHAT)


async def test_packages_are_found_from_the_current_folder_upwards(
    right_server: RightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(NODE_MODULES / "openai" / "resources")
    async with open_server(right_server.url, key=right_server.key, model=FAKE) as server:
        await run_case(server, "a chat", "/v1/chat/completions")


class HasOnlyChats(Fault):
    def answer(self, answer: RelayedAnswer) -> None:
        if not answer.asked.path.startswith(("/v1/chat", "/v1/models")):
            answer.status, answer.body = 404, b'{"detail":"Not Found"}'


async def test_a_route_that_is_not_there_is_no_failure(right_server: RightServer) -> None:
    names = (
        "openai-client.a-response-is-streamed-as-it-is-whole",
        "openai-js-client.a-response-is-streamed-as-it-is-whole",
        "anthropic-client.a-message-is-streamed-as-it-is-whole",
    )
    options = {"key": right_server.key, "model": FAKE, "node_modules": NODE_MODULES}
    async with wrong_server(right_server.url, HasOnlyChats) as url, open_server(url, **options) as server:
        reasons = [await reason_of(server, name) for name in names]
    assert reasons == [f"there is no /v1/{route}" for route in ("responses", "responses", "messages")]


class NeverAnswersChats(Fault):
    """Sets the event `asked` of its memory."""

    def is_silent(self) -> bool:
        is_chat = b"chat/completions" in self.requests
        if is_chat:
            self.memory["asked"].set()
        return is_chat


async def test_a_row_that_is_given_up_leaves_no_process_behind(right_server: RightServer) -> None:
    asked = asyncio.Event()

    def make_fault(memory: Memory) -> Fault:
        memory["asked"] = asked
        return NeverAnswersChats(memory)

    options = {"key": right_server.key, "model": FAKE, "node_modules": NODE_MODULES}
    async with wrong_server(right_server.url, make_fault) as url, open_server(url, **options) as server:
        row = asyncio.create_task(run_case(server, "a chat", "/v1/chat/completions"))
        await asyncio.wait_for(asked.wait(), 30)
        assert node_processes(url)
        row.cancel()
        with pytest.raises(asyncio.CancelledError):
            await row
        await asyncio.to_thread(wait_until, lambda: not node_processes(url), 5, "the end of Node")


def node_processes(url: str) -> list[int]:
    """Those that talk to it."""
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if f"{url}/v1" in (each.info["cmdline"] or ())]
