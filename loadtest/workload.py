"""Builds what one run sends, out of the options: the data set by name, tenants, nonces.

random             token ids or words of random lengths; conversations with --random-num-turns
prefix_repetition  a few prefixes, each continued in many ways
txt-slices         pieces of a text file
sharegpt           first prompts, or with --multi-turn conversations, of a file in ShareGPT's form
custom             JSONL of one's own
timed_trace, azure, burstgpt, usage, otel    traces, see loadtest/traces
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from loadtest.datasets.custom import custom_items
from loadtest.datasets.lengths import Lengths, share_of_prefix
from loadtest.datasets.prefix_repetition import PrefixRepetition, prefix_repetition_prompts
from loadtest.datasets.prompt import Conversation, Item, Prompt, num_distinct_requests, num_requests
from loadtest.datasets.random_prompts import (
    RandomShape,
    random_conversations,
    random_token_prompts,
    random_word_prompts,
    random_words,
)
from loadtest.datasets.sharegpt import sharegpt_items
from loadtest.datasets.tenants import read_tenants, with_tenants
from loadtest.datasets.text_slices import text_slice_prompts
from loadtest.options import TRACE_NAMES, BenchServeOptions
from loadtest.traces.replay import ReplaySettings, replay_trace
from loadtest.traces.trace_file import TraceForm, read_trace

NONCE_WORDS = 4  # of 250 each: two runs in four thousand million begin alike

__all__ = ["Item", "Prompt", "Workload", "build_workload", "random_prompts", "random_shape"]


@dataclass(frozen=True, slots=True)
class Workload:
    items: list[Item]
    offsets_ns: list[int] | None = None  # of a trace with its own times
    prefix_hit_share: float | None = (
        None  # of the prompt tokens, that a prefix cache will find; None: unknown
    )
    notes: Sequence[str] = ()  # what the user should know of the data set

    @property
    def num_requests(self) -> int:
        return num_requests(self.items)

    @property
    def num_distinct(self) -> int:
        return num_distinct_requests(self.items)


def build_workload(options: BenchServeOptions, num_items: int | None, nonce: Sequence[int]) -> Workload:
    """`num_items`: prompts or conversations; None: all that a trace has. Raises ConfigError."""
    workload = _of_dataset(options, num_items, nonce)
    items = workload.items
    if options.nonce_prefix:
        items = with_nonce(items, nonce)
    if options.tenants is not None:
        items = with_tenants(items, read_tenants(options.tenants), options.seed)
        if workload.prefix_hit_share:  # a server may keep what tenants have in its cache apart
            workload = dataclasses.replace(workload, prefix_hit_share=None)
    if options.prefix_hit_share is not None:
        workload = dataclasses.replace(workload, prefix_hit_share=options.prefix_hit_share)
    return dataclasses.replace(workload, items=items)


def random_shape(options: BenchServeOptions) -> RandomShape:
    return RandomShape(
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        vocab_size=options.random_vocab_size,
        input_cv=options.random_input_cv,
        output_cv=options.random_output_cv,
        max_input_len=options.max_input_len,
        max_output_len=options.max_output_len,
    )


def random_prompts(options: BenchServeOptions, num_prompts: int, nonce: Sequence[int]) -> list[Prompt]:
    """In the form that the backend takes: also for warm-ups of other data sets."""
    make = random_token_prompts if options.backend == "openai" else random_word_prompts
    return make(num_prompts, random_shape(options), options.seed, nonce)


def with_nonce(items: Sequence[Item], nonce: Sequence[int]) -> list[Item]:
    """The same words before every text, others in every run: no cache knows it from an earlier run, and
    what prompts have in common they still have."""
    words = " ".join(random_words(NONCE_WORDS, np.random.default_rng([*nonce, 3])))
    placed: list[Item] = []
    for item in items:
        if isinstance(item, Conversation):
            placed.append(msgspec.structs.replace(item, system=f"{words}\n{item.system}".strip()))
        elif isinstance(item.content, str):
            placed.append(msgspec.structs.replace(item, content=f"{words}\n{item.content}"))
        else:
            placed.append(item)  # token ids are random as they are, or somebody's very own
    return placed


def _of_dataset(options: BenchServeOptions, num_items: int | None, nonce: Sequence[int]) -> Workload:
    takes_ids = options.backend == "openai"
    if options.dataset_name in TRACE_NAMES:
        return _of_trace(options, num_items, nonce)
    assert num_items is not None, "only traces have an end of their own"
    path = options.dataset_path
    match options.dataset_name:
        case "random" if options.random_num_turns > 1:
            conversations = random_conversations(
                num_items,
                options.random_num_turns,
                random_shape(options),
                options.think_time_s,
                options.seed,
                nonce,
            )
            return Workload(list(conversations))
        case "random":
            prompts = random_prompts(options, num_items, nonce)
            lengths = random_shape(options).lengths(num_items, options.seed)[0]
            with_prefix = [options.random_prefix_len + length for length in lengths]
            share = share_of_prefix(options.random_prefix_len, num_items, with_prefix)
            return Workload(list(prompts), prefix_hit_share=share)
        case "prefix_repetition":
            shape = PrefixRepetition(
                options.prefix_repetition_prefix_len,
                options.prefix_repetition_suffix_len,
                options.prefix_repetition_num_prefixes,
                options.prefix_repetition_output_len,
                options.random_vocab_size,
            )
            prompts = prefix_repetition_prompts(num_items, shape, takes_ids, options.seed, nonce)
            return Workload(list(prompts), prefix_hit_share=shape.hit_share(num_items))
        case "sharegpt":
            items = sharegpt_items(
                path,
                num_items,
                output_len=options.sharegpt_output_len,
                max_turns=options.max_turns if options.multi_turn else 1,
                mean_think_time_s=options.think_time_s,
                is_shuffled=not options.disable_shuffle,
                seed=options.seed,
            )
            return Workload(items)
    assert path is not None, "check() wants a path for data sets in files"
    if options.dataset_name == "txt-slices":
        shape_of_random = random_shape(options)
        inputs = Lengths(
            shape_of_random.input_len,
            shape_of_random.range_ratio,
            shape_of_random.input_cv,
            shape_of_random.max_input_len,
        )
        outputs = Lengths(
            shape_of_random.output_len,
            shape_of_random.range_ratio,
            shape_of_random.output_cv,
            shape_of_random.max_output_len,
        )
        prompts = text_slice_prompts(path, num_items, inputs, outputs, options.seed, nonce)
        return Workload(list(prompts))
    items = custom_items(
        path,
        num_items,
        options.custom_output_len,
        takes_ids=takes_ids,
        mean_think_time_s=options.think_time_s,
        repeats=not options.no_oversample,
        seed=options.seed,
    )
    return Workload(items)


def _of_trace(options: BenchServeOptions, num_items: int | None, nonce: Sequence[int]) -> Workload:
    assert options.dataset_path is not None, "check() wants a path for traces"
    form = TraceForm(
        options.timed_trace_sec_multiplier,
        options.timed_trace_label_timestamp,
        options.timed_trace_label_input_length,
        options.timed_trace_label_output_length,
        options.timed_trace_label_hash_ids,
    )
    settings = ReplaySettings(
        takes_ids=options.backend == "openai",
        vocab_size=options.random_vocab_size,
        block_size=options.timed_trace_chunk_hash_size,
        time_scale=options.trace_time_scale,
        start_s=options.trace_start_s,
        duration_s=options.duration_s if options.is_self_timed else None,
        max_input_len=options.max_input_len,
        max_output_len=options.max_output_len,
    )
    notes: list[str] = []
    trace = read_trace(options.dataset_path, options.dataset_name, form, notes)
    replay = replay_trace(trace, settings, num_items, nonce)
    offsets_ns = replay.offsets_ns if options.is_self_timed else None
    return Workload(list(replay.prompts), offsets_ns, replay.prefix_hit_share, notes)
