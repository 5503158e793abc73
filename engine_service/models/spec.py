"""The shape of a model: what config.json or a GGUF header says, in one form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a runner must know of any model, whoever computes it."""

    architecture: str  # Hugging Face's class name
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int  # tokens that the model was trained for: the length if none is configured
    extended_context_len: int  # tokens up to which a configured length may stretch it; context_len or more

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


# -------------------------------------------------------------------------- rotary position embedding


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float  # positions are divided by it


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches low frequencies only, as Llama 3.1 was trained."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Raises the base as the text outgrows `original_context_len` ("dynamic NTK")."""

    factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Peng et al. 2023, https://arxiv.org/abs/2309.00071."""

    factor: float
    original_context_len: int
    attention_factor: float  # multiplies cosines and sines
    beta_fast: float
    beta_slow: float
    rounds_borders: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Ding et al. 2024, https://arxiv.org/abs/2402.13753: one divisor per pair of dimensions."""

    short_divisors: tuple[float, ...]
    long_divisors: tuple[float, ...]  # past original_context_len
    original_context_len: int
    attention_factor: float  # multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """GGUF's rope_freqs: Llama3Scaling, worked out by the converter."""

    divisors: tuple[float, ...]  # one per pair of dimensions


RopeScaling = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | LongRopeScaling | DivisorScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    rotary_dim: int  # the first dimensions of a head, which are turned; the others are not
    scaling: RopeScaling | None = None


# -------------------------------------------------------------------------- our own decoders


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in the place of an MLP."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of each expert
    normalises_weights: bool  # the chosen experts' weights sum to 1


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """In what one layer may differ from the next."""

    window: int | None = None  # a token sees this many keys, its own included; None: all before it
    rope: RopeSpec | None = None  # None: positions are not embedded here
    experts: ExpertsSpec | None = None  # None: a plain MLP


@dataclass(frozen=True, slots=True)
class DecoderSpec(ModelSpec):
    """A decoder of `engine_service.models.families`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    has_tied_head: bool  # the output projection is the embedding
    layers: tuple[LayerSpec, ...]
    attention_scale: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a layer's halves add to the residual
    logit_divisor: float = 1.0
    norm_offset: float = 0.0  # added to every norm's weight, in float32
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # of the attention's output projection
    has_mlp_bias: bool = False
    has_query_key_norm: bool = False  # over each head
    has_post_norms: bool = False  # attention's and MLP's results are normed before they are added

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim
