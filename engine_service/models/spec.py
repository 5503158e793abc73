"""The shape of a model: what config.json or a GGUF header says, in one form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches low rotary frequencies, as Llama 3.1 was trained (transformers, rope type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. At most one of the three scalings is set."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None
    frequency_divisors: tuple[float, ...] | None = None  # GGUF's rope_freqs: one per pair of dimensions


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str  # Hugging Face's class name; the registry's key
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_len: int  # tokens that the model was trained for
    has_tied_head: bool  # the output projection is the embedding
    rope: RopeSpec

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim
