"""What a long prompt does to those who decode: with fixed limits and with `target_itl_ms`.

    python -m tests.benchmarks.inter_token_latency

8 sequences decode, then a prompt of 8,000 tokens arrives; the default model, whose context is 8192. Fixed
limits and the target take turns in one run, on the same weights; each engine has seen a prompt of 1,000
tokens before. Every sequence that decodes gets its token at the end of a step, so the time between the ends
of two steps is the inter-token latency of all of them. Without `--target-itl-ms` the target is 4 times
the step of pure decoding. Where the limits stand at their least, the target is out of reach: "at the least".
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_service.engine import Engine
from engine_service.main import load_served_model
from engine_service.served_model import ServedModel, build_engine
from shared.config import DEFAULT_MODEL_SOURCE, ModelConfig
from shared.identifiers import RequestId, TenantId
from shared.messages import Submit
from shared.sampling import SamplingParams

NUM_DECODING = 8
DECODE_PROMPT_TOKENS = 64
WARMING_PROMPT_TOKENS = 1000
NUM_STEPS_BEFORE = 60
TIMES_DECODE_STEP = 4
NUM_CHUNKS = 8  # of the prompt's first and last steps, for the factor


@dataclass
class Times:
    """In seconds. Of all repeats."""

    before: list[float] = field(default_factory=list)  # steps of pure decoding
    during: list[float] = field(default_factory=list)  # steps that have a chunk of the prompt
    num_at_least: int = 0  # of these
    first_chunks: list[float] = field(default_factory=list)
    last_chunks: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)  # of the prompt, from its arrival


class Conversation:
    """An engine with sequences that decode for as long as it is measured."""

    def __init__(self, config: ModelConfig, served: ServedModel, seed: int) -> None:
        self._engine: Engine = build_engine(config, served)
        self._least_tokens = NUM_DECODING + served.card.block_size
        self.num_at_least = 0  # steps so far whose limit was that
        self._random = random.Random(seed)
        self._vocab_size = served.card.vocab_size
        self._num_requests = 0
        for _ in range(NUM_DECODING):
            self.submit(DECODE_PROMPT_TOKENS, max_tokens=8000 - DECODE_PROMPT_TOKENS)
        while self._engine.load().generation_tokens < 2 * NUM_DECODING:
            self._engine.step()

    def submit(self, num_tokens: int, max_tokens: int) -> RequestId:
        self._num_requests += 1
        name = RequestId(str(self._num_requests))
        prompt = [self._random.randrange(100, self._vocab_size) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True)
        self._engine.add(Submit(name, prompt, sampling, TenantId("bench")))
        return name

    def decode(self, num_steps: int) -> list[float]:
        return [self._step()[0] for _ in range(num_steps)]

    def prefill(self, num_tokens: int) -> list[float]:
        """The times of the steps from the arrival of a prompt to its first token."""
        name = self.submit(num_tokens, max_tokens=1)
        found = []
        while True:
            step_s, finished = self._step()
            found.append(step_s)
            if name in finished:
                return found

    def close(self) -> None:
        for number in range(1, self._num_requests + 1):
            self._engine.abort(RequestId(str(number)))
        self._engine.close()

    def _step(self) -> tuple[float, set[RequestId]]:
        began = time.perf_counter()
        outcome = self._engine.step()
        self.num_at_least += self._engine.load().max_num_tokens_now == self._least_tokens
        return time.perf_counter() - began, {timeline.request_id for timeline in outcome.finished}


def measure(
    config: ModelConfig, served: ServedModel, num_prompt_tokens: int, seed: int, times: Times
) -> None:
    conversation = Conversation(config, served, seed)
    conversation.prefill(WARMING_PROMPT_TOKENS)
    times.before += conversation.decode(NUM_STEPS_BEFORE)
    num_at_least = conversation.num_at_least
    during = conversation.prefill(num_prompt_tokens)
    times.num_at_least += conversation.num_at_least - num_at_least
    conversation.close()
    times.during += during
    times.first_chunks += during[:NUM_CHUNKS]
    times.last_chunks += during[-NUM_CHUNKS - 1 : -1]  # the very last one is what was left
    times.first_token.append(sum(during))


def decode_step_s(config: ModelConfig, served: ServedModel) -> float:
    conversation = Conversation(config, served, seed=0)
    found = statistics.median(conversation.decode(20))
    conversation.close()
    return found


def quantile_ms(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] * 1e3


COLUMNS = (
    "limits",
    "before p50, ms",
    "p99",
    "during p50, ms",
    "p95",
    "p99",
    "within target",
    "at the least",
    "first chunks, times a step of decoding",
    "last chunks",
    "prompt's first token, s",
)


def print_row(name: str, times: Times, target_s: float) -> None:
    before_s = statistics.median(times.before)
    num_within = sum(step_s <= target_s for step_s in times.during)
    cells = [
        name,
        *(f"{quantile_ms(times.before, share):.0f}" for share in (0.5, 0.99)),
        *(f"{quantile_ms(times.during, share):.0f}" for share in (0.5, 0.95, 0.99)),
        *(f"{number / len(times.during):.0%}" for number in (num_within, times.num_at_least)),
        *(f"{statistics.median(of) / before_s:.1f}" for of in (times.first_chunks, times.last_chunks)),
        f"{statistics.median(times.first_token):.1f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL_SOURCE)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--target-itl-ms", type=float)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    fixed = ModelConfig(
        name="bench",
        source=options.model,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,
        num_gpu_blocks_override=2048,
    )
    served = load_served_model(fixed)
    target_ms = options.target_itl_ms or TIMES_DECODE_STEP * decode_step_s(fixed, served) * 1e3
    ways = {"fixed": fixed, "target": fixed.model_copy(update={"target_itl_ms": target_ms})}
    times = {name: Times() for name in ways}
    for repeat in range(options.repeats):
        for name, config in ways.items():
            measure(config, served, options.prompt_tokens, repeat + 1, times[name])
    print(
        f"{NUM_DECODING} sequences decode, then a prompt of {options.prompt_tokens:,} tokens arrives; "
        f"{options.model}."
    )
    print(
        f"At most {options.max_num_batched_tokens} tokens in a step; target {target_ms:.0f} ms; "
        f"repeats: {options.repeats}.\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * (len(COLUMNS) - 1)}|")
    for name, found in times.items():
        print_row(name, found, target_ms / 1e3)


if __name__ == "__main__":
    main()
