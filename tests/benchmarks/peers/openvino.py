"""OpenVINO GenAI's continuous batching behind openvino_server.py, since its package has no HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.peers.contestant import MAX_TOKENS_CACHED, Absent, Contestant, Launch
from tests.benchmarks.peers.peers_folder import MODEL_NAME, PeersFolder

FAMILY = "openvino"
OPENVINO_GENAI = "2026.4.1.0"
WEIGHT_FORMATS = ("fp32", "int8")
BLOCK_SIZE = 32  # tokens, on CPUs
SERVER = Path(__file__).with_name("openvino_server.py")


def openvino(folder: PeersFolder) -> list[Contestant] | Absent:
    python = folder.program(FAMILY, "python")
    present = [form for form in WEIGHT_FORMATS if (folder.openvino(form) / "openvino_model.xml").is_file()]
    if not python.exists() or not present:
        return Absent(FAMILY, f"not in {folder.path}; python -m tests.benchmarks.peers.install {FAMILY}")
    return [_contestant(python, form, folder.openvino(form)) for form in present]


def _contestant(python: Path, weight_format: str, model: Path) -> Contestant:
    def command(launch: Launch) -> Sequence[str]:
        return [
            # -P: the server's folder has an openvino.py, this one.
            *(str(python), "-P", str(SERVER), "--model", str(model), "--name", MODEL_NAME),
            *("--port", str(launch.port), "--threads", str(launch.num_threads)),
            *("--kv-blocks", str(MAX_TOKENS_CACHED // BLOCK_SIZE)),
        ]

    return Contestant(
        name=f"{FAMILY}-{weight_format}",
        family=FAMILY,
        version=f"openvino-genai {OPENVINO_GENAI}",
        command=command,
        health_path="/health",
    )
