"""llama.cpp's server, built from the sources that llama-cpp-python ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.peers.contestant import MAX_TOKENS_CACHED, Absent, Contestant, Launch
from tests.benchmarks.peers.instruction_set import InstructionSet
from tests.benchmarks.peers.peers_folder import MODEL_NAME, PeersFolder

FAMILY = "llama"
LLAMA_CPP_PYTHON = "0.3.36"
QUANTIZATIONS = ("q8_0", "q4_1", "f16")
NUM_SLOTS = 32  # each has an equal part of the context: 1024 tokens


def llama(
    folder: PeersFolder, instruction_set: InstructionSet, model: Path | None = None
) -> list[Contestant] | Absent:
    """With the default model in several forms, or with this GGUF file."""
    server = folder.llama_build(instruction_set) / "bin" / "llama-server"
    if not server.is_file():
        return Absent(FAMILY, f"no {server}; python -m tests.benchmarks.peers.install {FAMILY}")
    if model is not None:
        return [_contestant(server, model.stem, model, instruction_set)]
    return [
        _contestant(server, quantization, folder.gguf(quantization), instruction_set)
        for quantization in QUANTIZATIONS
        if folder.gguf(quantization).is_file()
    ]


def _contestant(
    server: Path, quantization: str, weights: Path, instruction_set: InstructionSet
) -> Contestant:
    def command(launch: Launch) -> Sequence[str]:
        threads = str(launch.num_threads)
        return [
            *(str(server), "--model", str(weights), "--alias", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(launch.port), "--offline"),
            *("--threads", threads, "--threads-batch", threads),
            *("--parallel", str(NUM_SLOTS), "--ctx-size", str(MAX_TOKENS_CACHED)),
        ]

    return Contestant(
        name=f"{FAMILY}-{quantization}",
        family=FAMILY,
        version=f"llama.cpp of llama-cpp-python {LLAMA_CPP_PYTHON}, built for {instruction_set}",
        command=command,
        health_path="/health",
    )
