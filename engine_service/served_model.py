"""A model ready to compute, and the engine around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine_service.block_pool import BlockPool
from engine_service.engine import Engine
from engine_service.fair_share import FairShare
from engine_service.kv_events import KvEvent, KvEventRecorder
from engine_service.runner import Runner
from engine_service.scheduler import Scheduler
from engine_service.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from engine_service.step_execution import StepExecution
from engine_service.step_limits import StepLimits
from engine_service.step_time_target import StepTimeTarget
from engine_service.structured_output.grammar_desk import GrammarDesk
from engine_service.structured_output.llguidance_compiler import LlguidanceCompiler
from engine_service.structured_output.llguidance_grammar import LlguidanceVocabulary
from shared.config import ModelConfig
from shared.messages import ModelCard
from shared.processors import num_compute_cores
from shared.text_bundle import TextBundle

POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = MappingProxyType(
    {"fair_share": FairShare, "fcfs": FirstComeFirstServed}
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a model source gives: something that computes, and all that gateways need to know."""

    runner: Runner[Any]
    card: ModelCard
    text_bundle: TextBundle


def build_engine(
    config: ModelConfig,
    served: ServedModel,
    *,
    publish_kv_events: Callable[[list[KvEvent]], None] | None = None,
    execution: StepExecution | None = None,
    force_preemption_every: int = 0,
) -> Engine:
    """An engine with an empty cache over the model's KV blocks. `execution` as in Engine."""
    card = served.card
    kv_events = KvEventRecorder(card.block_size, publish_kv_events) if publish_kv_events is not None else None
    scheduler = Scheduler(
        BlockPool(served.runner.num_blocks, card.block_size, kv_events),
        max_num_seqs=card.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=card.max_model_len,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        long_prefill_token_threshold=(
            config.long_prefill_token_threshold or max(1, config.max_num_batched_tokens // 2)
        ),
        policy=POLICIES[config.scheduling_policy](),
        limits=_limits(config, card),
        eos_token_ids=frozenset(card.eos_token_ids),
        enable_prefix_caching=config.enable_prefix_caching,
        force_preemption_every=force_preemption_every,
    )
    vocabulary = LlguidanceVocabulary(served.text_bundle.tokenizer_json, card.vocab_size, card.eos_token_ids)
    grammars = GrammarDesk(LlguidanceCompiler(vocabulary))
    return Engine(
        scheduler,
        served.runner,
        vocab_size=card.vocab_size,
        grammars=grammars,
        kv_events=kv_events,
        execution=execution,
    )


def _limits(config: ModelConfig, card: ModelCard) -> StepLimits | None:
    """None: those that are configured."""
    if config.target_itl_ms is None:
        return None
    return StepTimeTarget(
        target_itl_s=config.target_itl_ms / 1e3,
        max_num_seqs=card.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        min_chunk_tokens=card.block_size,
    )


def overlaps_steps(config: ModelConfig) -> bool:
    """Whether the next step is planned while one computes: as configured, or where it pays."""
    if config.runner != "generate":
        return False
    return config.device != "cpu" if config.async_scheduling is None else config.async_scheduling


def num_compute_threads(config: ModelConfig) -> int:
    """As configured, or this process's cores, shared out among engines that have the same ones."""
    num_sharing = 1 if config.has_own_processors else max(1, config.num_engines)
    return config.num_threads or max(1, num_compute_cores() // num_sharing)
