// Shapes and strides (in floats) of one call of paged attention; see kernels/operators.py.
#pragma once

#include <cstdint>

struct PagedAttention {
  const float* query;  // [num_tokens, num_heads, head_dim]; heads are contiguous
  int64_t query_stride;  // from token to token
  const float* keys;  // [num_blocks, num_kv_heads, block_size, head_dim]
  const float* values;
  float* output;  // [num_tokens, num_heads, head_dim]
  const int32_t* query_start;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t max_blocks;
  int num_seqs;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int block_size;
  int window;  // keys that a token sees, its own included; 0: all before it
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
};

void paged_attention(const PagedAttention& call, int num_threads);
