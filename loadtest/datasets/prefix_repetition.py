"""A few prefixes, each continued in many ways: what routing by prefix affinity is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.datasets.prompt import Prompt
from loadtest.datasets.random_prompts import random_ids, random_words


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    vocab_size: int = 30_000

    def hit_share(self, num_prompts: int) -> float:
        """Of the prompt tokens, those that an endless prefix cache has seen before."""
        num_repeated = max(0, num_prompts - self.num_prefixes)
        return num_repeated * self.prefix_len / (num_prompts * (self.prefix_len + self.suffix_len))


def prefix_repetition_prompts(
    num_prompts: int, shape: PrefixRepetition, takes_ids: bool, seed: int, nonce: Sequence[int]
) -> list[Prompt]:
    """In random order. Prefixes come equally often, up to one; vLLM leaves the remainder out."""
    rng = np.random.default_rng([seed, *nonce])

    def some(count: int) -> list[int] | list[str]:
        if takes_ids:
            ids: list[int] = random_ids(count, shape.vocab_size, rng).tolist()
            return ids
        return random_words(count, rng)

    prefixes = [some(shape.prefix_len) for _ in range(shape.num_prefixes)]
    prompts = []
    for index in rng.permutation(num_prompts):
        content = prefixes[index % shape.num_prefixes] + some(shape.suffix_len)
        prompts.append(Prompt(content if takes_ids else " ".join(content), shape.output_len))
    return prompts
