"""One process per model replica: sockets, scheduler, block pool, model runner, sampler.

Without a service: `from engine_service import LLM, SamplingParams` runs a model in the caller's process
(`engine_service.offline`). These names are looked up when they are first used, so that the services,
which import this package too, load nothing for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_service.offline.async_llm import AsyncLLM
    from engine_service.offline.beam_search_request import BeamSearchOutput, BeamSearchSequence
    from engine_service.offline.failures import EngineFailedError, GenerationError
    from engine_service.offline.llm import LLM
    from engine_service.offline.pooling_params import PoolingParams
    from engine_service.offline.request_output import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from engine_service.offline.sampling_params import (
        BeamSearchParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineFailedError",
    "GenerationError",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULE_OF = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchOutput": "beam_search_request",
    "BeamSearchParams": "sampling_params",
    "BeamSearchSequence": "beam_search_request",
    "CompletionOutput": "request_output",
    "EmbeddingOutput": "request_output",
    "EmbeddingRequestOutput": "request_output",
    "EngineFailedError": "failures",
    "GenerationError": "failures",
    "Logprob": "request_output",
    "PoolingParams": "pooling_params",
    "RequestOutput": "request_output",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"engine_service.offline.{_MODULE_OF[name]}"), name)
