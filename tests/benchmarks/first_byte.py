"""How soon the first event of a stream leaves the gateway, while other streams keep it busy.

    python -m tests.benchmarks.first_byte [--streams 64] [--events-per-s 20000] [--seconds 20]

From when the engine hands its message to ZeroMQ to when the first event is in the kernel at the client (its
own timestamp, SO_TIMESTAMPNS: no client has to be awake for it), and to when the client has read it. Engine,
gateway, one client for three quarters of the streams, which go on for the whole time, and one for the rest,
which begin again and again, are processes of their own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.benchmarks import paced_engine
from tests.benchmarks.gateway_relay import busy_s, chat_request, read_streams
from tests.stack import Stack, fake_model, wait_until
from tests.valkey_server import running_valkey

SO_TIMESTAMPNS = 35  # of Linux; Python has no name for it
FIRST_PROBE_SEED = 1_000_000  # others have the first numbers
PROBE_TOKENS = 100  # of a stream that begins anew when it has them
BUCKET = re.compile(r'^headrace_first_event_delay_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.M)


@dataclass(frozen=True, slots=True)
class Arrival:
    seed: int  # by which the engine knows the stream
    in_kernel_ns: int
    read_ns: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events-per-s", type=float, default=20_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(
        "| events/s | gateway busy | late steps | first bytes "
        "| ms to the client's kernel: p50 / p90 / p99 / max "
        "| ms to the client: p50 / p90 / p99 | within 5 ms, by the gateway's own metric |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory(prefix="hr-") as directory:
            _measure(Path(directory), arguments.streams, arguments.events_per_s, arguments.seconds)


def _measure(directory: Path, num_streams: int, events_per_s: float, seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    step_interval_s = num_streams / events_per_s
    num_probes = num_streams // 4
    with running_valkey(directory) as redis_url:
        document = {"models": [fake_model(engines=0, max_model_len=1_000_000)]}
        with Stack(redis_url, document, fresh=True) as stack:
            ours, theirs = context.Pipe()
            address = f"ipc://{directory}/engine.sock"
            engine = context.Process(
                target=paced_engine.run,
                args=(address, redis_url, stack.config.redis.namespace, step_interval_s, theirs),
            )
            engine.start()
            assert ours.recv() == "listening"
            stack.wait_linked(1)
            key = stack.key()
            num_tokens = int(seconds / step_interval_s)
            with context.Pool(2) as pool:
                num_others = num_streams - num_probes
                others = pool.apply_async(read_streams, (stack.url, key, num_others, num_tokens))
                wait_until(lambda: stack.gauges()["in flight"] == num_others, what="the other streams")
                counts_before = _counts(stack)
                probes = pool.apply_async(probe, (stack.url, key, num_probes, seconds * 0.8))
                gateway = psutil.Process(stack.processes["gateway"].pid)
                began_at, busy_before = time.monotonic(), busy_s(gateway)
                arrivals = probes.get()
                busy_share = (busy_s(gateway) - busy_before) / (time.monotonic() - began_at)
                num_events, took_s = others.get()
            ours.send("end")
            first_sent_at_ns, num_late_steps = ours.recv()
            engine.join()
            counts = _counts(stack)
    num_within, num_all = (counts[bound] - counts_before[bound] for bound in (0.005, math.inf))
    own_metric = num_within / num_all
    events_per_s = num_events / took_s * num_streams / num_others
    _tell(arrivals, first_sent_at_ns, events_per_s, busy_share, num_late_steps / num_tokens, own_metric)


def _tell(
    arrivals: Sequence[Arrival],
    first_sent_at_ns: Mapping[int, int],
    events_per_s: float,
    busy_share: float,
    late_share: float,
    own_metric: float,
) -> None:
    kernel_ms = sorted((one.in_kernel_ns - first_sent_at_ns[one.seed]) / 1e6 for one in arrivals)
    read_ms = sorted((one.read_ns - first_sent_at_ns[one.seed]) / 1e6 for one in arrivals)
    print(
        f"| {events_per_s:,.0f} | {busy_share:.0%} | {late_share:.1%} | {len(arrivals)} "
        f"| {_shown(kernel_ms, 0.5, 0.9, 0.99, 1)} | {_shown(read_ms, 0.5, 0.9, 0.99)} "
        f"| {own_metric:.1%} |",
        flush=True,
    )


def _shown(ordered: Sequence[float], *shares: float) -> str:
    return " / ".join(f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.2f}" for share in shares)


def _counts(stack: Stack) -> dict[float, float]:
    """By the bound of a bucket: first events within it, as the gateway itself has measured."""
    _, exposition = stack.get("/metrics")
    return {float(bound): float(count) for bound, count in BUCKET.findall(exposition.decode())}


def probe(url: str, key: str, num_probes: int, seconds: float) -> list[Arrival]:
    """Streams that begin again and again for so long, each in a thread, which sleeps in the kernel until
    there is something to read."""
    arrivals: list[Arrival] = []
    ends_at = time.monotonic() + seconds
    # The kernel begins to take times a while after the first one has asked: not to be waited for each time.
    for_its_times = socket.socket()
    for_its_times.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    threads = [
        threading.Thread(target=_probe, args=(url, key, number, num_probes, ends_at, arrivals))
        for number in range(num_probes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for_its_times.close()
    return arrivals


def _probe(url: str, key: str, number: int, num_probes: int, ends_at: float, arrivals: list[Arrival]) -> None:
    time.sleep(number / num_probes / 3)  # each begins at its own moment of the others' streams
    seed = FIRST_PROBE_SEED + number
    while time.monotonic() < ends_at:
        seed += num_probes
        arrivals.append(_first_event_of(url, key, seed))


def _first_event_of(url: str, key: str, seed: int) -> Arrival:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), 30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        connection.sendall(chat_request(address.netloc, key, seed, PROBE_TOKENS))
        data = b""
        while b"data: " not in data:
            more, ancillary, _, _ = connection.recvmsg(65536, 1024)
            read_ns = time.time_ns()
            assert more, data
            data += more
        [stamp] = [value for _, kind, value in ancillary if kind == SO_TIMESTAMPNS]
        whole_s, ns = struct.unpack("qq", stamp[:16])
        while more := connection.recv(65536):
            data = data[-100:] + more
        assert b"[DONE]" in data, data
    return Arrival(seed, whole_s * 10**9 + ns, read_ns)


if __name__ == "__main__":
    main()
