"""One run of the load generator, as a process of its own, against a server that runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from compose.stack_plan import headrace
from tests.benchmarks.peers.case import Case
from tests.benchmarks.peers.foreign_load import ForeignLoad
from tests.benchmarks.peers.measurement import Measurement, error_of, figures_of
from tests.benchmarks.peers.process_tree import MemoryPeak, MemorySampler
from tests.benchmarks.peers.server import Server

NUM_WARMUPS = 2
MEBIBYTE = 2**20


def measure(
    server: Server,
    memory: MemorySampler,
    case: Case,
    name: str,
    round_number: int,
    attempt: int,
    nonce: int,
    folder: Path,
    timeout_s: float,
) -> Measurement:
    """`folder` gets the client's own files. Equal nonces give equal prompts."""
    stem = f"{case.name}-{attempt}"
    result_file = folder / f"{stem}.json"
    load = ForeignLoad(server.pid)
    complaint = _run(_command(server, case, nonce, result_file), folder / f"{stem}.txt", timeout_s)
    foreign_cores = load.cores()
    result: dict[str, Any] | None = json.loads(result_file.read_bytes()) if result_file.exists() else None
    figures = {} if result is None else figures_of(result, case) | _memory_figures(memory.peak())
    return Measurement(
        server=name,
        round_number=round_number,
        case=case.name,
        attempt=attempt,
        figures=figures | {"ready_s": server.ready_s},
        foreign_cores=foreign_cores,
        error=complaint if result is None else error_of(result, case),
        client=result,
    )


def _memory_figures(peak: MemoryPeak) -> dict[str, float]:
    return {
        "peak_memory_mib": peak.tree_bytes / MEBIBYTE,
        "largest_process_mib": peak.largest_process_bytes / MEBIBYTE,
    }


def _command(server: Server, case: Case, nonce: int, result_file: Path) -> tuple[str, ...]:
    return headrace(
        "bench", "serve",
        "--base-url", server.base_url,
        *(("--api-key", server.api_key) if server.api_key else ()),
        "--max-concurrency", str(case.concurrency),
        "--num-prompts", str(case.num_requests),
        "--random-input-len", str(case.input_len),
        "--random-output-len", str(case.output_len),
        "--random-prefix-len", str(case.prefix_len),
        "--num-warmups", str(NUM_WARMUPS),
        "--temperature", "0",
        "--ignore-eos",
        # llama.cpp's server drops a connection after a streamed answer without saying so before.
        "--header", "Connection=close",
        "--nonce", str(nonce),
        "--metric-percentiles", "50,95,99",
        "--save-result",
        "--result-dir", str(result_file.parent),
        "--result-filename", result_file.name,
    )  # fmt: skip


def _run(command: tuple[str, ...], log: Path, timeout_s: float) -> str:
    """What to say if it has left no result."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"not done after {timeout_s:g} s"
    said = log.read_text(errors="replace").strip().splitlines()
    return f"the client ended with {code}: {said[-1] if said else 'it said nothing'}"
