"""Writes a GGUF file with the shape of Llama 3.2 1B (arXiv 2407.21783) and random 4-bit weights.

    python -m tests.benchmarks.peers.large_model FILE [--seed N]

Speed and memory do not depend on what the weights are: with it, `--model FILE` shows that the figures are not
those of one tiny model. The tokenizer is the default model's, so the vocabulary has 49,152 tokens. 660 MB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from engine_service.model_source import resolve_source
from shared.config import DEFAULT_MODEL_SOURCE

NUM_LAYERS, HIDDEN, INTERMEDIATE = 16, 2048, 8192
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 64
MATRICES = {
    "attn_q": (NUM_HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}
DEVIATION = 0.02  # of the weights, as models are initialised

_GROUP = 32  # of Q4_0 and Q8_0: a half scale, then the numbers


def write_large_model(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    num_tokens = _copy_tokenizer(writer)
    _add(
        writer,
        "token_embd",
        _random_blocks(random, num_tokens, HIDDEN, _GROUP, 147.0),
        GGMLQuantizationType.Q8_0,
    )
    ones = np.ones(HIDDEN, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(NUM_LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for name, (num_outputs, num_inputs) in MATRICES.items():
            blocks = _random_blocks(random, num_outputs, num_inputs, _GROUP // 2, 4.6)
            _add(writer, f"blk.{layer}.{name}", blocks, GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, name: str, blocks: np.ndarray, kind: GGMLQuantizationType) -> None:
    writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)


def _copy_tokenizer(writer: GGUFWriter) -> int:
    """Returns the size of the vocabulary."""
    reader = GGUFReader(resolve_source(DEFAULT_MODEL_SOURCE).path)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            writer.add_key_value(
                name, field.contents(), kind, inner[0] if kind == GGUFValueType.ARRAY else None
            )
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def _random_blocks(
    random: np.random.Generator, num_rows: int, num_inputs: int, num_bytes: int, deviation: float
) -> np.ndarray:
    """uint8 `[num_rows, bytes]` of blocks with `num_bytes` bytes of numbers, which have that deviation."""
    num_blocks = num_inputs // _GROUP
    bytes_ = random.integers(0, 256, (num_rows, num_blocks, 2 + num_bytes), dtype=np.uint8)
    bytes_[..., :2] = np.frombuffer(np.float16(DEVIATION / deviation).tobytes(), dtype=np.uint8)
    return bytes_.reshape(num_rows, -1)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    write_large_model(flags.file, flags.seed)


if __name__ == "__main__":
    main()
