"""Where the peers lie: one folder, an environment or a build of its own for each, and the weights for all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine_service.model_source import resolve_source
from shared.config import DEFAULT_MODEL_SOURCE

DEFAULT_PEERS_DIR = Path(".headrace/peers")
MODEL_NAME = "bench"  # under which the peers serve it


@dataclass(frozen=True, slots=True)
class PeersFolder:
    """Every weight comes from the default model's GGUF file: what is compared is speed, on the same model."""

    path: Path  # absolute

    @property
    def llama_source(self) -> Path:
        return self.path / "llama" / "source"

    def llama_build(self, instruction_set: str) -> Path:
        return self.path / "llama" / f"build-{instruction_set}"

    def environment(self, family: str) -> Path:
        """A Python virtual environment."""
        return self.path / family / "venv"

    def program(self, family: str, name: str) -> Path:
        return self.environment(family) / "bin" / name

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def gguf(self, quantization: str) -> Path:
        """Q4_1 is the default model's own file, the others were made from it."""
        if quantization == "q4_1":
            return resolve_source(DEFAULT_MODEL_SOURCE).path
        return self.weights / f"{quantization}.gguf"

    @property
    def hugging_face(self) -> Path:
        return self.weights / "huggingface"

    def openvino(self, weight_format: str) -> Path:
        return self.weights / f"openvino-{weight_format}"
