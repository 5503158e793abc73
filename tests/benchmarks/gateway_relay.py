"""What the gateway relays: token events a second, and the processor time that each costs it.

    python -m tests.benchmarks.gateway_relay [--streams 64] [--tokens 2000] [--step-delay-ms 0]

A real gateway and a real engine process with a fake model; raw sockets of a third process are the clients.
The figure that others on the machine change least is the gateway's own processor time: its inverse is what a
worker process relays on a core of its own. Where the engine is faster than the gateway, several tokens share
an event; with a delay of about 2 ms for each step of 64 streams hardly any do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.stack import Stack, fake_model
from tests.valkey_server import running_valkey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--step-delay-ms", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, running_valkey(Path(directory)) as redis_url:
        model = fake_model(options=f"step_delay_ms={arguments.step_delay_ms}", max_num_seqs=arguments.streams)
        with Stack(redis_url, {"models": [model]}, fresh=True) as stack:
            print("| tokens/s | events a token | gateway µs a token | µs an event | engine µs a token |")
            print("|---:|---:|---:|---:|---:|")
            for _ in range(arguments.repeats):
                _measure(stack, arguments.streams, arguments.tokens)


def _measure(stack: Stack, num_streams: int, num_tokens: int) -> None:
    gateway, engine = (psutil.Process(stack.processes[name].pid) for name in ("gateway", "fake-0"))
    before = busy_s(gateway), busy_s(engine)
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        num_events, seconds = pool.apply(read_streams, (stack.url, stack.key(), num_streams, num_tokens))
    assert time.monotonic() > begin
    total = num_streams * num_tokens
    gateway_us = (busy_s(gateway) - before[0]) / total * 1e6
    engine_us = (busy_s(engine) - before[1]) / total * 1e6
    print(
        f"| {total / seconds:,.0f} | {num_events / total:.2f} | {gateway_us:.1f} "
        f"| {gateway_us * total / num_events:.1f} | {engine_us:.1f} |",
        flush=True,
    )


def busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def read_streams(url: str, key: str, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """Events that came, and how long that took."""
    return asyncio.run(_read_streams(url, key, num_streams, num_tokens))


async def _read_streams(url: str, key: str, num_streams: int, num_tokens: int) -> tuple[int, float]:
    begin = time.monotonic()
    counts = await asyncio.gather(
        *(_read_stream(url, key, num_tokens, number) for number in range(num_streams))
    )
    return sum(counts), time.monotonic() - begin


async def _read_stream(url: str, key: str, num_tokens: int, number: int) -> int:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20)
    writer.write(chat_request(address.netloc, key, number, num_tokens))
    num_events, tail = 0, b""
    while data := await reader.read(2**18):
        data = tail + data
        num_events += data.count(b'"content":')
        tail = data[-9:]  # one byte shorter than what is counted
    assert b"[DONE]" in tail or b"0\r\n\r\n" in tail, f"a stream was cut: {tail!r}"
    writer.close()
    return num_events


def chat_request(host: str, key: str, number: int, num_tokens: int) -> bytes:
    """Of a stream of its own, on a connection of its own."""
    document = {
        "model": "fake",
        "messages": [{"role": "user", "content": f"stream {number}"}],
        "max_tokens": num_tokens,
        "seed": number,
        "stream": True,
    }
    body = json.dumps(document).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    main()
