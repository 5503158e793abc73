"""What fewer bits cost in accuracy: perplexity of a text, and how often the likeliest token stays.

    python -m tests.benchmarks.quantization_accuracy [--model SOURCE] [--tokens N]

Compared with weights and KV cache in float32 are weights as the file stores them (which differs for GGUF),
with activations of 16 bits and as by default, weights in int8, the KV cache in float16 and in int8, and what
runs if nothing is configured. The text is Python's own help, so that everybody has it. Each part of it is
scored as a prompt.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
from dataclasses import dataclass

from engine_service import LLM, SamplingParams
from engine_service.offline.model_options import ModelOptions
from shared.config import DEFAULT_MODEL_SOURCE

PART_TOKENS = 1024
EXACT = ModelOptions(quantization="none", kv_cache_dtype="float32")
COMPARED: dict[str, ModelOptions] = {
    "weights as stored, activations in int16": {"kv_cache_dtype": "float32", "activation_dtype": "int16"},
    "weights as stored": {"kv_cache_dtype": "float32"},
    "weights in int8": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "KV cache in float16": {"quantization": "none", "kv_cache_dtype": "float16"},
    "KV cache in int8": {"quantization": "none", "kv_cache_dtype": "int8"},
    "as by default": {},
    "weights and KV cache in int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


@dataclass(frozen=True)
class Score:
    """Of each token but the first of each part."""

    logprobs: list[float]
    likeliest: list[int]  # the token that greedy decoding would have put in its place

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def score(model: str, options: ModelOptions, num_tokens: int) -> Score:
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    found = Score([], [])
    with LLM(model, max_model_len=PART_TOKENS + 1, **options) as llm:
        tokens = llm.get_tokenizer().encode(text[: num_tokens * 8])[:num_tokens]
        parts = [tokens[begin : begin + PART_TOKENS] for begin in range(0, len(tokens), PART_TOKENS)]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        for part, output in zip(parts, llm.generate(parts, params, use_tqdm=False), strict=True):
            assert output.prompt_logprobs is not None, "the scores of the prompt were asked for"
            for token_id, named in zip(part[1:], output.prompt_logprobs[1:], strict=True):
                assert named is not None, "only the first token has no score"
                found.logprobs.append(named[token_id].logprob)
                found.likeliest.append(next(each for each, told in named.items() if told.rank == 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL_SOURCE)
    parser.add_argument("--tokens", type=int, default=8192)
    flags = parser.parse_args()
    exact = score(flags.model, EXACT, flags.tokens)
    print(f"{len(exact.logprobs)} tokens: perplexity {exact.perplexity:.4f} in float32")
    for name, options in COMPARED.items():
        other = score(flags.model, options, flags.tokens)
        num_same = sum(a == b for a, b in zip(exact.likeliest, other.likeliest, strict=True))
        print(
            f"{name}: perplexity {other.perplexity:.4f} ({other.perplexity / exact.perplexity - 1:+.3%}); "
            f"the likeliest token is the same for {num_same / len(exact.likeliest):.2%}"
        )


if __name__ == "__main__":
    main()
