// Shapes and strides (in floats) of one call of paged attention; see kernels/operators.py.
#pragma once

#include <cstdint>
#include <vector>

#include "paged_cache.h"

class Team;

struct PagedAttention {
  const float* query;  // [num_tokens, num_heads, head_dim]; heads are contiguous
  int64_t query_stride;  // from token to token
  PagedCache cache;
  float* output;  // [num_tokens, num_heads, head_dim]
  const int32_t* query_start;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t max_blocks;
  int num_seqs;
  int num_heads;
  int window;  // keys that a token sees, its own included; 0: all before it
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
};

struct AttentionItem {
  int sequence;
  int kv_head;
  int first_row;  // of the sequence's query tokens in this step
  int num_rows;
};

// The work of a call, the same for every layer of a step.
std::vector<AttentionItem> attention_items(const PagedAttention& call);

// `items` are those of `call`.
void paged_attention(Team& team, const PagedAttention& call, const std::vector<AttentionItem>& items);
