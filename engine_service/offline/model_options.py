"""From the keywords of vLLM's constructors to the configuration of a model."""

from __future__ import annotations

import difflib
import re
from typing import Any, Literal, TypedDict

from pydantic import ValidationError

from shared.config import ActivationDtype, KVCacheDtype, ModelConfig, Pooling, Quantization, Runner
from shared.errors import ConfigError


class ModelOptions(TypedDict, total=False):
    """Keywords of LLM and AsyncLLM beside `model`. Meanings and defaults: shared.config.ModelConfig."""

    served_model_name: str  # how log lines call it; default: made from `model`
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    kv_cache_dtype: KVCacheDtype
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
    quantization: Quantization | None
    activation_dtype: ActivationDtype
    weight_cache: bool
    seed: int  # of the seeds that are drawn for requests without one
    num_threads: int | None
    max_queued_requests: int
    max_queued_tokens: int | None
    scheduling_policy: Literal["fair_share", "fcfs"]
    async_scheduling: bool | None
    long_prefill_token_threshold: int | None
    target_itl_ms: float | None
    device: Literal["cpu", "cuda"]
    runner: Runner  # "pooling": for `embed`
    pooling: Pooling | None
    normalize: bool
    is_matryoshka: bool | None
    # vLLM's, accepted where they say what is so anyway
    tensor_parallel_size: Literal[1]
    pipeline_parallel_size: Literal[1]
    trust_remote_code: Literal[False]
    enforce_eager: bool
    disable_log_stats: bool


_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
_NEEDS = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "trust_remote_code": False}
_WITHOUT_EFFECT = ("enforce_eager", "disable_log_stats")


def model_config_of(model: str, options: ModelOptions) -> ModelConfig:
    """Raises ConfigError that names the wrong keyword, and the nearest known one if it is unknown."""
    known = list(ModelOptions.__annotations__)
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, [*known, "model"], n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"unknown option {name!r}{hint}", name)
    values: dict[str, Any] = dict(options)
    for name, needed in _NEEDS.items():
        if values.pop(name, needed) != needed:
            raise ConfigError(f"{name} can only be {needed} here", name)
    for name in _WITHOUT_EFFECT:
        values.pop(name, None)
    if values.get("dtype") == "auto":
        del values["dtype"]
    elif "dtype" in values:
        values["dtype"] = _DTYPES.get(values["dtype"], values["dtype"])
    name = values.pop("served_model_name", None) or _name_of(model)
    try:
        return ModelConfig(name=name, source=model, **values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "model"
        field = {"source": "model", "name": "served_model_name"}.get(field, field)
        raise ConfigError(f"{field}: {first['msg']}", field) from error


def _name_of(source: object) -> str:
    """A name that the configuration accepts."""
    last = str(source).rstrip("/").rpartition("/")[2].removeprefix("package:").partition(",")[0]
    return re.sub(r"[^A-Za-z0-9._-]", "-", last).strip("-._")[:128] or "model"
