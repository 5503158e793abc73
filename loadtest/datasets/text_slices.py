"""Pieces of a text file, cut to lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loadtest.datasets.lengths import Lengths
from loadtest.datasets.prompt import Prompt
from shared.errors import ConfigError

TOKENS_PER_WORD = 1.3  # of English prose in the usual vocabularies; what it really was, usage tells


def text_slice_prompts(
    path: Path,
    num_prompts: int,
    inputs: Lengths,
    outputs: Lengths,
    seed: int,
    nonce: Sequence[int],
) -> list[Prompt]:
    """Each begins at a word of its own, as far as the file has words; one that reaches its end goes on
    at its beginning. Raises ConfigError for a file without text."""
    try:
        words = path.read_text(encoding="utf-8-sig", errors="replace").split()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "--dataset-path") from error
    if not words:
        raise ConfigError(f"{path} holds no text", "--dataset-path")
    lengths_rng = np.random.default_rng(seed)
    input_lens = inputs.draw(num_prompts, lengths_rng)
    output_lens = outputs.draw(num_prompts, lengths_rng)
    starts = np.random.default_rng([seed, *nonce]).permutation(len(words))
    prompts = []
    for index, (input_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True)):
        start = int(starts[index % len(words)])
        num_words = max(1, round(input_len / TOKENS_PER_WORD))
        piece = words[start : start + num_words]
        while len(piece) < num_words:
            piece += words[: num_words - len(piece)]
        prompts.append(Prompt(" ".join(piece), output_len))
    return prompts
