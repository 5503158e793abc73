"""What 8-bit weights cost in accuracy: perplexity of a text, and how often the likeliest token stays.

    python -m tests.benchmarks.quantization_accuracy [--model SOURCE] [--tokens N]

The text is Python's own help, so that everybody has it. Each part of it is scored as a prompt.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
from typing import Literal

from engine_service import LLM, SamplingParams
from shared.config import DEFAULT_MODEL_SOURCE

PART_TOKENS = 1024


def score(model: str, quantization: Literal["int8"] | None, num_tokens: int) -> tuple[list[float], list[int]]:
    """The log-probability of each token but the first of each part, and the likeliest token in its place."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    logprobs: list[float] = []
    likeliest: list[int] = []
    with LLM(model, quantization=quantization, max_model_len=PART_TOKENS + 1) as llm:
        tokens = llm.get_tokenizer().encode(text[: num_tokens * 8])[:num_tokens]
        parts = [tokens[begin : begin + PART_TOKENS] for begin in range(0, len(tokens), PART_TOKENS)]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        for part, output in zip(parts, llm.generate(parts, params, use_tqdm=False), strict=True):
            assert output.prompt_logprobs is not None, "the scores of the prompt were asked for"
            for token_id, named in zip(part[1:], output.prompt_logprobs[1:], strict=True):
                assert named is not None, "only the first token has no score"
                logprobs.append(named[token_id].logprob)
                likeliest.append(next(each for each, found in named.items() if found.rank == 1))
    return logprobs, likeliest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL_SOURCE)
    parser.add_argument("--tokens", type=int, default=8192)
    flags = parser.parse_args()
    plain, plain_likeliest = score(flags.model, None, flags.tokens)
    rounded, rounded_likeliest = score(flags.model, "int8", flags.tokens)
    before, after = (math.exp(-sum(logprobs) / len(logprobs)) for logprobs in (plain, rounded))
    num_same = sum(a == b for a, b in zip(plain_likeliest, rounded_likeliest, strict=True))
    print(f"{len(plain)} tokens: perplexity {before:.4f} as loaded, {after:.4f} with int8", end=" ")
    print(f"({after / before - 1:+.2%}); the likeliest token is the same for {num_same / len(plain):.1%}")


if __name__ == "__main__":
    main()
