"""What a gateway adds to a request, and how many requests one of its processes carries on one core.

    make bench-gateway [ARGS="--rounds 3 --seconds 8 --vllm-router FILE --litellm FILE"]

All in one run, in turns: an upstream that answers at once, asked directly, and through each gateway. Headrace
does all that it can do for a request: key, limits of every kind in a Redis, tokenising, a route of two
variants, a usage record, and the way over ZeroMQ to an engine that answers at once. Each request has a text
of its own, but in "known texts", where all have the same, as in the turns of a conversation. The others pass
HTTP on;
`vllm-router` has neither keys nor limits, LiteLLM is started with a key alone. The gateway has one processor,
everything else the other one.

At a fixed rate: Poisson arrivals, latency from when a request was due. Full: `wrk` with 1 and 16 connections.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from loadtest.machine import checkout_commit, describe_machine
from tests.benchmarks.gateway_overhead import open_loop
from tests.benchmarks.gateway_overhead.contestant import (
    CLIENTS_PROCESSOR,
    Contestant,
    Target,
    direct,
    headrace,
    litellm,
    vllm_router,
)
from tests.benchmarks.gateway_overhead.open_loop import NUMBER_MARK
from tests.benchmarks.gateway_overhead.upstream import NUM_TOKENS

TEXT = ("The headrace leads the water of the river to the wheel of the mill. " * 7)[:440]


@dataclass(frozen=True, slots=True)
class AtRate:
    p50_ms: float
    p99_ms: float
    first_p50_ms: float  # to the first byte of the body
    late_p99_ms: float  # by which the client itself sent too late
    failed: int
    cpu_us: float | None  # of the gateway, for each request


@dataclass(frozen=True, slots=True)
class Full:
    requests_per_s: float
    p50_ms: float
    failed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rate", type=float, default=500, help="requests/s of the open loop")
    parser.add_argument("--vllm-router", type=Path, help="its program; left out if not given")
    parser.add_argument("--litellm", type=Path, help="its program; left out if not given")
    parser.add_argument("--litellm-rate", type=float, default=40, help="it does not carry 500")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("error: wrk is needed (Debian: apt install wrk)")
    print(f"{describe_machine()}; commit {checkout_commit()}; {arguments.rounds} rounds\n")
    os.sched_setaffinity(0, {CLIENTS_PROCESSOR})
    contestants = [
        Contestant("direct", direct),
        Contestant("headrace", headrace),
        Contestant("headrace, known texts", functools.partial(headrace, varies=False)),
    ]
    if arguments.vllm_router:
        contestants.append(Contestant("vllm-router", vllm_router(arguments.vllm_router)))
    if arguments.litellm:
        contestants.append(Contestant("litellm", litellm(arguments.litellm)))
    rates: Mapping[str, float] = defaultdict(lambda: arguments.rate, litellm=arguments.litellm_rate)
    at_rate: dict[tuple[str, bool], list[AtRate]] = defaultdict(list)
    full: dict[tuple[str, bool, int], list[Full]] = defaultdict(list)
    for number in range(arguments.rounds):
        for contestant in contestants:
            with contestant.running() as target:
                for streamed in (False, True):
                    _full(target, streamed, 16, 2.0)  # warm
                    seen = _at_rate(target, streamed, rates[contestant.name], arguments.seconds, number)
                    at_rate[contestant.name, streamed].append(seen)
                    for connections in (1, 16):
                        carried = _full(target, streamed, connections, arguments.seconds)
                        full[contestant.name, streamed, connections].append(carried)
            print(f"round {number + 1}: {contestant.name}", file=sys.stderr, flush=True)
    _tell([contestant.name for contestant in contestants], rates, at_rate, full)


def _message(target: Target, *, streamed: bool) -> bytes:
    body = _body(target, streamed=streamed)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n"
        f"Authorization: Bearer {target.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _body(target: Target, *, streamed: bool) -> bytes:
    number = NUMBER_MARK.decode() if target.varies else "00000000"
    document = {
        "model": target.streamed_model if streamed else target.model,
        "messages": [{"role": "user", "content": f"{number}: {TEXT}"}],
        "max_tokens": NUM_TOKENS,
        "stream": streamed,
    }
    return json.dumps(document).encode()


def _at_rate(target: Target, streamed: bool, rate: float, seconds: float, seed: int) -> AtRate:
    busy_before = _busy_s(target)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        message = _message(target, streamed=streamed)
        seen = pool.apply(open_loop.run, (target.port, message, rate, seconds, seed))
    busy_s = _busy_s(target)
    whole = np.array(seen.last_byte) * 1e3
    return AtRate(
        p50_ms=float(np.percentile(whole, 50)),
        p99_ms=float(np.percentile(whole, 99)),
        first_p50_ms=float(np.percentile(seen.first_byte, 50)) * 1e3,
        late_p99_ms=float(np.percentile(seen.late, 99)) * 1e3,
        failed=seen.num_failed,
        cpu_us=None if busy_s is None or busy_before is None else (busy_s - busy_before) / len(whole) * 1e6,
    )


def _busy_s(target: Target) -> float | None:
    if target.pid is None:
        return None
    processes = [psutil.Process(target.pid), *psutil.Process(target.pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _full(target: Target, streamed: bool, connections: int, seconds: float) -> Full:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "post.lua"
        body = json.dumps(_body(target, streamed=streamed).decode())
        script.write_text(
            f'wrk.method = "POST"\nlocal body, number = {body}, 0\n'
            f"function request()\n"
            f"  number = number + 1\n"
            f'  local numbered = body:gsub("{NUMBER_MARK.decode()}", string.format("%08d", number))\n'
            f"  return wrk.format(nil, nil, nil, numbered)\n"
            f"end\n"
            f'wrk.headers["Content-Type"] = "application/json"\n'
            f'wrk.headers["Authorization"] = "Bearer {target.key}"\n'
        )
        command = [
            "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", "--timeout", "30s",
            "-s", str(script), f"http://127.0.0.1:{target.port}/v1/chat/completions",
        ]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _read_wrk(output)


def _read_wrk(output: str) -> Full:
    [requests_per_s] = re.findall(r"Requests/sec:\s+([\d.]+)", output)
    [(p50, unit)] = re.findall(r"50%\s+([\d.]+)(us|ms|s)", output)
    failed = re.findall(r"Non-2xx or 3xx responses: (\d+)", output)
    errors = re.findall(r"(?:connect|read|write|timeout) (\d+)", output)
    in_ms = {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]
    return Full(float(requests_per_s), float(p50) * in_ms, sum(map(int, [*failed, *errors])))


def _tell(
    names: Sequence[str],
    rates: Mapping[str, float],
    at_rate: Mapping[tuple[str, bool], Sequence[AtRate]],
    full: Mapping[tuple[str, bool, int], Sequence[Full]],
) -> None:
    """Medians over the rounds. Percentiles are never subtracted from each other but for medians."""
    for streamed in (False, True):
        print(f"\n{'streamed' if streamed else 'not streamed'}\n")
        print(
            "| path | asked/s | p50 ms | added at p50 | p99 ms | first byte p50 | gateway CPU µs a request "
            "| client late p99 ms | c=1 req/s | c=16 req/s (worst, best) | c=16 p50 ms | failed |"
        )
        print("|---|" + "---:|" * 11)
        base = statistics.median(one.p50_ms for one in at_rate["direct", streamed])
        for name in names:
            seen = at_rate[name, streamed]
            alone, many = full[name, streamed, 1], full[name, streamed, 16]
            p50 = statistics.median(one.p50_ms for one in seen)
            cpu = [one.cpu_us for one in seen if one.cpu_us is not None]
            carried = sorted(one.requests_per_s for one in many)
            failed = sum(one.failed for one in (*seen, *alone, *many))
            print(
                f"| {name} | {rates[name]:g} | {p50:.2f} | {p50 - base:+.2f} "
                f"| {statistics.median(one.p99_ms for one in seen):.2f} "
                f"| {statistics.median(one.first_p50_ms for one in seen):.2f} "
                f"| {f'{statistics.median(cpu):.0f}' if cpu else '-'} "
                f"| {statistics.median(one.late_p99_ms for one in seen):.2f} "
                f"| {statistics.median(one.requests_per_s for one in alone):,.0f} "
                f"| {statistics.median(carried):,.0f} ({carried[0]:,.0f}, {carried[-1]:,.0f}) "
                f"| {statistics.median(one.p50_ms for one in many):.2f} | {failed} |"
            )


if __name__ == "__main__":
    began_at = time.monotonic()
    main()
    print(f"\n{time.monotonic() - began_at:.0f} s", file=sys.stderr)
