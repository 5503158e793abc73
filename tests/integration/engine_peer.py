"""A real engine process with a fake model, and a gateway's end of its wire, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq

from engine_service.fake_runner import FakeModel
from shared.identifiers import GatewayId, RequestId, TenantId
from shared.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineHello,
    FromEngine,
    FromGateway,
    GatewayHello,
    Heartbeat,
    Reject,
    StepResult,
    Submit,
    decode,
    encode,
)
from shared.sampling import SamplingParams
from tests.warm_process import ROOT, WarmProcess, start_warm

TIMEOUT_S = 20.0
M = TypeVar("M", bound=FromEngine)


@dataclass
class Peer:
    """A gateway as the engine sees it. Keeps everything that it was sent."""

    socket: zmq.Socket[bytes]
    gateway_id: GatewayId
    messages: list[FromEngine] = field(default_factory=list)

    def send(self, message: FromGateway) -> None:
        self.socket.send_multipart(encode(message))

    def hello(self, known_bundles: tuple[str, ...] = (), version: int = PROTOCOL_VERSION) -> EngineHello:
        self.send(GatewayHello(version, self.gateway_id, list(known_bundles)))
        return self.wait_for(EngineHello)

    def submit(self, name: str, prompt: list[int] | None = None, max_tokens: int = 5) -> Submit:
        sampling = SamplingParams(max_tokens, seed=1, temperature=0.0)
        submit = Submit(RequestId(name), prompt or [65, 66, 67], sampling, TenantId("acme"))
        self.send(submit)
        return submit

    def abort(self, *names: str) -> None:
        self.send(Abort([RequestId(name) for name in names]))

    def receive(self, timeout_s: float = TIMEOUT_S) -> FromEngine:
        assert self.socket.poll(int(timeout_s * 1000)), f"{self.gateway_id}: nothing came in {timeout_s} s"
        message = decode(self.socket.recv_multipart())
        assert not isinstance(message, FromGateway)
        self.messages.append(message)
        return message

    def wait_for(self, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of a kind for which the condition holds."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            message = self.receive()
            if isinstance(message, kind) and condition(message):
                return message
        raise AssertionError(f"{self.gateway_id}: no such {kind.__name__} in {TIMEOUT_S} s")

    def wait_until_finished(self, *names: str) -> None:
        missing = set(names) - self.finished()
        while missing:
            self.wait_for(StepResult)
            missing -= self.finished()

    def wait_for_reject(self, name: str) -> Reject:
        return self.wait_for(Reject, lambda reject: reject.request_id == name)

    def wait_until_idle(self) -> None:
        """Until the engine says that nothing runs or waits, and all blocks are free."""
        self.wait_for(
            Heartbeat,
            lambda beat: (
                beat.load.num_running + beat.load.num_waiting == 0
                and beat.load.num_free_blocks == beat.load.num_blocks
            ),
        )

    def tokens(self, name: str) -> list[int]:
        return [
            token
            for step in self.messages
            if isinstance(step, StepResult)
            for update in step.updates
            if update.request_id == name
            for token in update.new_token_ids
        ]

    def finished(self) -> set[str]:
        return {
            update.request_id
            for step in self.messages
            if isinstance(step, StepResult)
            for update in step.updates
            if update.finish_reason is not None
        }


@contextlib.contextmanager
def peer(address: str, gateway_id: str = "gateway-a", receive_high_water_mark: int = 0) -> Iterator[Peer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, gateway_id.encode())
    socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    try:
        yield Peer(socket, GatewayId(gateway_id))
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def engine(
    address: str, *flags: str, source: str | None = "fake:step_delay_ms=5", fresh: bool = False
) -> Iterator[subprocess.Popen[str] | WarmProcess]:
    """An engine process, killed at the end if it still runs. Its log is in `stderr`.

    `source` is None where `flags` name a configuration file. `fresh`: as of a `tests.stack.Stack`.
    """
    arguments = ["--bind", address, *flags]
    if source is not None:
        arguments += ["--source", source]
    log, log_end = os.pipe()
    with os.fdopen(log) as stderr:
        process: subprocess.Popen[str] | WarmProcess
        try:
            if fresh:
                command = [sys.executable, "-m", "engine_service", *arguments]
                process = subprocess.Popen(command, cwd=ROOT, stderr=log_end, text=True)
            else:
                process = start_warm(
                    "engine_service", *arguments, environment=dict(os.environ), stdout=log_end, stderr=log_end
                )
        finally:
            os.close(log_end)
        process.stderr = stderr
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def stop(process: subprocess.Popen[str] | WarmProcess) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(TIMEOUT_S)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie is dead


def expected_tokens(submit: Submit) -> list[int]:
    return FakeModel().generate(submit.prompt_token_ids, submit.sampling.max_tokens, submit.sampling)


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not come true in {timeout_s} s"
        time.sleep(0.02)
