"""The `headrace` command: quick to start, honest about mistakes."""

from __future__ import annotations

import http.server
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from compose.conversation import Conversation
from compose.engine_table import engine_rows, engine_table
from compose.gateway_client import GatewayClient, GatewayError
from compose.greeting import url_to_dial
from compose.run_directory import ServicePids, StackRecord
from shared.identifiers import EngineEpoch, EngineId
from shared.messages import EngineLoad
from shared.redis_schema import EngineRecord

SECRETS = ("HEADRACE_REDIS_URL", "HEADRACE_KEY_PEPPER", "HEADRACE_ADMIN_TOKEN", "HEADRACE_API_KEY")


def headrace(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return subprocess.run(
        [sys.executable, "-m", "compose.cli", *arguments],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys, compose.cli\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'numpy', 'zmq', 'redis', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_every_command_explains_itself(tmp_path: Path) -> None:
    shown = headrace("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for command in ("up", "gateway", "engine", "keys", "status", "chat", "bench", "models"):
        assert command in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("status",), "no stack is up in .headrace"),
        (("keys", "list"), "no stack is up in .headrace"),
        (("chat",), "start one with `headrace up`"),
        (("gateway",), "HEADRACE_REDIS_URL must be set"),
        (("engine",), "HEADRACE_REDIS_URL must be set"),
        (("up", "--config", "absent.toml"), "cannot read absent.toml"),
        (("chat", "--url", "http://127.0.0.1:1"), "HEADRACE_API_KEY must be set"),
    ],
)
def test_what_is_missing_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    ended = headrace(*arguments, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert complaint in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_status_shows_load_and_what_is_down() -> None:
    engine_ids = [EngineId("m-0"), EngineId("m-1")]
    stack = StackRecord(
        "http://127.0.0.1:1", "key", "token", "redis://", "ns",
        ServicePids(1, 2, 3, {engine_ids[0]: os.getpid()}), engine_ids, "/run",
    )  # fmt: skip
    load = EngineLoad(
        num_running=1,
        num_waiting=2,
        num_free_blocks=25,
        num_blocks=100,
        outstanding_tokens=0,
        prompt_tokens=7,
    )
    record = EngineRecord(engine_ids[0], EngineEpoch("e"), "ipc://", "m", "ready", os.getpid(), load)
    up, down = engine_rows([record], stack)
    assert (up.num_running, up.num_waiting, up.kv_cache_usage, up.prompt_tokens) == (1, 2, 0.75, 7)
    assert up.epoch_age_s is not None
    assert down.state == "down"
    assert engine_rows([record], None)[0].epoch_age_s is None, "perhaps another machine's process id"


def test_status_shows_the_limits_of_engines_that_have_a_target() -> None:
    def shown(*loads: EngineLoad | None) -> str:
        records = [
            EngineRecord(EngineId(f"m-{number}"), EngineEpoch("e"), "ipc://", "m", "ready", 1, load)
            for number, load in enumerate(loads)
        ]
        console = Console(width=200, file=io.StringIO())
        with console.capture() as capture:
            console.print(engine_table(engine_rows(records, None), None))
        return capture.get()

    idle = EngineLoad(0, 0, 1, 1, 0, max_num_seqs_now=64, max_num_tokens_now=512)
    slow = msgspec.structs.replace(
        idle, max_num_seqs_now=3, max_num_tokens_now=19, decode_step_p95_ms=51.7, meets_itl_target=False
    )
    quick = msgspec.structs.replace(slow, decode_step_p95_ms=9.0, meets_itl_target=True)
    assert "limits" not in shown(idle, None)
    lines = shown(idle, slow, quick, None).splitlines()
    assert lines[0].split()[-3:] == ["limits", "step", "p95"]
    assert lines[1].split()[-2:] == ["–", "–"]
    assert lines[2].endswith("3 seqs, 19 tokens  52 ms, target missed ")
    assert lines[3].split()[-2:] == ["9", "ms"]
    assert lines[4].split()[-2:] == ["–", "–"]


@pytest.mark.parametrize(
    ("listening", "dialled"),
    [
        ("http://0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.1:80", "http://10.0.0.1:80"),
    ],
)
def test_a_wildcard_address_is_shown_as_one_that_can_be_dialled(listening: str, dialled: str) -> None:
    assert url_to_dial(listening) == dialled


class OneAnswer(http.server.BaseHTTPRequestHandler):
    """Streams what the last message says, word by word; the word CUT ends the connection early."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = body["messages"][-1]["content"].split()
        self.send_response(200)
        self.end_headers()
        for word in words:
            if word == "CUT":
                return
            event = {"choices": [{"delta": {"content": f"{word} "}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no such key"}}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        pass


@pytest.fixture
def client() -> Iterator[GatewayClient]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield GatewayClient(f"http://127.0.0.1:{server.server_port}", "key")
        server.shutdown()
        thread.join()


def test_a_conversation_remembers_also_an_answer_that_was_stopped(client: GatewayClient) -> None:
    conversation = Conversation(client, "m", max_tokens=5, system="be brief")
    assert "".join(conversation.ask("one two")) == "one two "
    pieces = conversation.ask("three four")
    assert next(pieces) == "three "
    pieces.close()
    assert [message["content"] for message in conversation.messages] == [
        "be brief", "one two", "one two ", "three four", "three ",
    ]  # fmt: skip


def test_a_question_without_an_answer_is_taken_back(client: GatewayClient) -> None:
    conversation = Conversation(client, "m", max_tokens=5)
    with pytest.raises(GatewayError, match="ended early"):
        list(conversation.ask("CUT"))
    assert conversation.messages == []


def test_a_refusal_is_told_in_the_gateways_words(client: GatewayClient) -> None:
    with pytest.raises(GatewayError, match="401: no such key"):
        client.models()
    with pytest.raises(GatewayError, match="cannot reach"):
        GatewayClient("http://127.0.0.1:1", "key").models()
