"""Headrace itself, in one or several configurations: the whole stack, as `headrace up` starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compose.run_directory import read_stack
from compose.stack_config import ADMIN_TOKEN, KEY_PEPPER, REDIS_URL
from compose.stack_plan import headrace as headrace_command
from loadtest.machine import checkout_commit
from shared.config import DEFAULT_MODEL_SOURCE, load_config
from tests.benchmarks.peers.contestant import MAX_TOKENS_CACHED, Contestant, Launch

FAMILY = "headrace"
BLOCK_SIZE = 16
# Of the default model: its 4-bit blocks as they are stored, these with keys and values of 8 bits or with
# activations of 16, 8-bit weights, or dequantised ones.
BUILT_IN: Mapping[str, str] = {
    "stored": "",
    "kv-int8": 'kv_cache_dtype = "int8"\n',
    "int16": 'activation_dtype = "int16"\n',
    "int8": 'quantization = "int8"\n',
    "float32": 'quantization = "none"\n',
}
DEFAULTS = ("stored", "kv-int8", "int16")


def headrace(name: str, config: Path | None, model: Path | None = None) -> Contestant:
    """With a configuration file, or the built-in one of that name and a GGUF file (None: the default model).

    Raises ConfigError for a wrong configuration.
    """
    if config is not None:
        load_config(config)  # refused here rather than after the first round's peers
        config = config.absolute()

    def command(launch: Launch) -> Sequence[str]:
        file = config or _written(BUILT_IN[name], str(model or DEFAULT_MODEL_SOURCE), launch)
        run_directory = str(_run_directory(launch))
        return headrace_command(
            "up", "--config", str(file), "--port", str(launch.port), "--run-dir", run_directory
        )

    return Contestant(
        name=f"{FAMILY}-{name}",
        family=FAMILY,
        version=checkout_commit() or "unknown commit",
        command=command,
        environment=lambda _: dict.fromkeys((REDIS_URL, KEY_PEPPER, ADMIN_TOKEN), ""),
        health_path="/readyz",
        is_ready=lambda launch: _demo_key(launch) is not None,  # stack.json comes a little later
        api_key=_demo_key,
        is_headrace=True,
    )


def _run_directory(launch: Launch) -> Path:
    return launch.folder / "run"


def _written(options: str, source: str, launch: Launch) -> Path:
    file = launch.folder / "headrace.toml"
    file.write_text(
        f'[[models]]\nname = "bench"\nsource = "{source}"\nmax_model_len = 2048\n'
        f"num_gpu_blocks_override = {MAX_TOKENS_CACHED // BLOCK_SIZE}\n{options}"
    )
    return file


def _demo_key(launch: Launch) -> str | None:
    stack = read_stack(_run_directory(launch))
    return stack.demo_key if stack is not None else None
