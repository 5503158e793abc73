// Shapes and strides (in floats) of one call of paged attention; see kernels/operators.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
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

// Some query tokens of a sequence, for all heads that share a KV head.
struct AttentionItem {
  int sequence;
  int kv_head;
  int first_row;  // of the sequence's query tokens in this step
  int num_rows;
  int split;  // index into `AttentionItems::splits`; -1: of all its keys
  int part;   // of the keys, if it is one of a split
};

// An item whose parts of keys are items of their own.
struct AttentionSplit {
  int num_parts;
  size_t first_float;  // of its parts' sums
};

// The work of a call, the same for every layer of a step, whatever its window is.
struct AttentionItems {
  std::vector<AttentionItem> items;
  std::vector<AttentionSplit> splits;
  std::unique_ptr<float[]> sums;                 // of the parts of splits
  std::unique_ptr<std::atomic<int>[]> num_left;  // of each split: parts that are not done yet
};

AttentionItems attention_items(const PagedAttention& call);

// `items` are those of `call`, and of one call at a time.
void paged_attention(Team& team, const PagedAttention& call, const AttentionItems& items);
