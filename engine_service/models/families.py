"""The decoder families that we compute ourselves, each as what it has beyond Llama.

decoder_config.py reads a configuration as the family says. Checked against transformers' modules:
tests/integration/test_model_families.py has a random model of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from engine_service.models.rope_config import Config, read_rope
from engine_service.models.spec import ExpertsSpec, RopeSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"

# -------------------------------------------------------------------------- windows, by layer


def _no_window(config: Config, index: int) -> int | None:
    return None


def _same_window(config: Config, index: int) -> int | None:
    return config.get("sliding_window")


def _last_layers_window(config: Config, index: int) -> int | None:
    """Qwen: off unless switched on, then from layer max_window_layers on."""
    if not config.get("use_sliding_window"):
        return None
    slides = index >= int(config.get("max_window_layers", 28))
    return config.get("sliding_window") if _layer_type(config, index, slides) == _SLIDING else None


def _switched_window(config: Config, index: int) -> int | None:
    """Qwen3-MoE: off unless switched on, then in every layer."""
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _unrotated_window(config: Config, index: int) -> int | None:
    """SmolLM3: off unless switched on, then in the layers without rotary embedding."""
    if not config.get("use_sliding_window"):
        return None
    slides = not _smollm3_rotates(config, index)
    return config.get("sliding_window") if _layer_type(config, index, slides) == _SLIDING else None


def _alternating_window(config: Config, index: int) -> int | None:
    """Gemma: every sliding_window_pattern-th layer sees everything."""
    return config.get("sliding_window") if _gemma_layer_type(config, index) == _SLIDING else None


def _gemma_layer_type(config: Config, index: int) -> str:
    return _layer_type(config, index, bool((index + 1) % int(config["sliding_window_pattern"])))


def _layer_type(config: Config, index: int, slides: bool) -> str:
    """The layer's entry in `layer_types`; where there is no such list, what `slides` says."""
    types = config.get("layer_types")
    if not types:
        return _SLIDING if slides else _FULL
    if types[index] not in (_FULL, _SLIDING):
        raise ValueError(f"layers of type {types[index]!r} are not supported")
    return str(types[index])


# -------------------------------------------------------------------------- rotary embedding, by layer


def _same_rope(config: Config, head_dim: int, index: int) -> RopeSpec | None:
    return read_rope(config, head_dim)


def _smollm3_rotates(config: Config, index: int) -> bool:
    given = config.get("no_rope_layers")  # despite its name, 1 means with rotary embedding
    return bool(given[index]) if given else (index + 1) % int(config.get("no_rope_layer_interval", 4)) != 0


def _some_ropes(config: Config, head_dim: int, index: int) -> RopeSpec | None:
    return read_rope(config, head_dim) if _smollm3_rotates(config, index) else None


def _gemma3_rope(config: Config, head_dim: int, index: int) -> RopeSpec | None:
    """A base for layers with windows and one for the others; in the old spelling only theirs is scaled."""
    layer_type = _gemma_layer_type(config, index)
    if isinstance((config.get("rope_parameters") or {}).get(layer_type), Mapping):
        default_theta = 10_000.0 if layer_type == _SLIDING else 1_000_000.0
        return read_rope({**config, "rope_theta": default_theta}, head_dim, layer_type)
    if layer_type == _SLIDING:
        return RopeSpec(float(config.get("rope_local_base_freq", 10_000.0)), head_dim)
    return read_rope({"rope_theta": 1_000_000.0, **config, "rope_parameters": None}, head_dim)


# -------------------------------------------------------------------------- experts, by layer


def _no_experts(config: Config, index: int) -> ExpertsSpec | None:
    return None


def _mixtral_experts(config: Config, index: int) -> ExpertsSpec | None:
    return ExpertsSpec(
        num_experts=int(config["num_local_experts"]),
        num_experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        normalises_weights=True,
    )


def _qwen3_experts(config: Config, index: int) -> ExpertsSpec | None:
    is_sparse = (index + 1) % int(config["decoder_sparse_step"]) == 0
    # transformers 5 writes Mixtral's name for it.
    num_experts = int(config.get("num_local_experts") or config["num_experts"])
    if index in (config.get("mlp_only_layers") or ()) or not is_sparse or not num_experts:
        return None
    return ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        normalises_weights=bool(config["norm_topk_prob"]),
    )


# -------------------------------------------------------------------------- the families


@dataclass(frozen=True, slots=True)
class Family:
    """In what a family differs from Llama. `defaults` are transformers' where config.json is silent."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    window: Callable[[Config, int], int | None] = _no_window
    rope: Callable[[Config, int, int], RopeSpec | None] = _same_rope
    experts: Callable[[Config, int], ExpertsSpec | None] = _no_experts
    activation_field: str = "hidden_act"
    scale_field: str | None = None  # scale of attention scores, as it is
    inverse_square_scale_field: str | None = None  # the scale is 1 / sqrt of this one
    scales_embedding: bool = False  # by sqrt(hidden_size)
    norm_offset: float = 0.0
    has_query_key_norm: bool = False
    has_post_norms: bool = False
    rotates_part_of_head: bool = False  # if the configuration says so; the others ignore or refuse it
    has_attention_bias_field: bool = True
    always_has_qkv_bias: bool = False
    nested_field: str | None = None  # where the configuration of the text model lies in the whole one's
    tensor_renames: tuple[tuple[str, str], ...] = ()  # parts of a checkpoint's names, to Llama's
    unused_tensors: tuple[str, ...] = ()  # beginnings of names, after renaming, of what is not for text

    def tensor_name(self, in_checkpoint: str) -> str | None:
        """Llama's name for it; None if the tensor is not used."""
        for theirs, ours in self.tensor_renames:
            in_checkpoint = in_checkpoint.replace(theirs, ours)
        return None if in_checkpoint.startswith(self.unused_tensors) else in_checkpoint


_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA3 = Family(
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
    },
    window=_alternating_window,
    rope=_gemma3_rope,
    activation_field="hidden_activation",
    inverse_square_scale_field="query_pre_attn_scalar",
    scales_embedding=True,
    norm_offset=1.0,
    has_query_key_norm=True,
    has_post_norms=True,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),  # 1 to 3, SmolLM2, and all that copied it
        "MistralForCausalLM": Family(
            defaults={"sliding_window": 4096}, window=_same_window, has_attention_bias_field=False
        ),
        "MixtralForCausalLM": Family(
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            window=_same_window,
            experts=_mixtral_experts,
            has_attention_bias_field=False,
            tensor_renames=(
                (".block_sparse_moe.", ".mlp."),
                (".w1.", ".gate_proj."),
                (".w2.", ".down_proj."),
                (".w3.", ".up_proj."),
            ),
        ),
        "Qwen2ForCausalLM": Family(
            defaults={"sliding_window": 4096},
            window=_last_layers_window,
            has_attention_bias_field=False,
            always_has_qkv_bias=True,
        ),
        "Qwen3ForCausalLM": Family(
            defaults={"head_dim": 128, "sliding_window": 4096},
            window=_last_layers_window,
            has_query_key_norm=True,
        ),
        "Qwen3MoeForCausalLM": Family(
            defaults={
                "sliding_window": 4096,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "num_experts": 128,
                "norm_topk_prob": False,
            },
            window=_switched_window,
            experts=_qwen3_experts,
            has_query_key_norm=True,
        ),
        "SmolLM3ForCausalLM": Family(
            defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
            window=_unrotated_window,
            rope=_some_ropes,
        ),
        "Phi3ForCausalLM": Family(
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            window=_same_window,
            rotates_part_of_head=True,
            has_attention_bias_field=False,
        ),
        "Gemma2ForCausalLM": Family(
            defaults={
                **_GEMMA_DEFAULTS,
                "sliding_window_pattern": 2,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
            },
            window=_alternating_window,
            activation_field="hidden_activation",
            inverse_square_scale_field="query_pre_attn_scalar",
            scales_embedding=True,
            norm_offset=1.0,
            has_post_norms=True,
        ),
        "Gemma3ForCausalLM": _GEMMA3,
        # Sees images, which we do not send; with text alone it is the model above.
        "Gemma3ForConditionalGeneration": replace(
            _GEMMA3,
            nested_field="text_config",
            tensor_renames=(
                ("language_model.model.", "model."),
                ("model.language_model.", "model."),
                ("language_model.lm_head.", "lm_head."),
                ("model.vision_tower.", "vision_tower."),
                ("model.multi_modal_projector.", "multi_modal_projector."),
            ),
            unused_tensors=("vision_tower.", "multi_modal_projector."),
        ),
        "GraniteForCausalLM": Family(
            defaults={"attention_multiplier": 1.0}, scale_field="attention_multiplier"
        ),
    }
)


def family_without_head(architecture: str) -> str | None:
    """The key in FAMILIES of a model that was saved without its output projection ("Qwen3Model")."""
    stem = architecture.removesuffix("Model").removesuffix("Text")
    name = f"{stem}ForCausalLM"
    return name if architecture.endswith("Model") and name in FAMILIES else None
