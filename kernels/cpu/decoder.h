// The forward pass of a decoder over one step's tokens, in one call. What it computes: engine_service/models/decoder.py,
// which is its oracle.
#pragma once

#include <cstdint>

#include "linear.h"
#include "paged_cache.h"

// Both are read by kernels/cpu/native_decoder.py too, which fills them: keep them alike. Pointers to norms, biases and
// tables may be null where a model has none; a norm's weight is float32 [its width].

constexpr int kMostQkvParts = 3;

struct DecoderLayer {
  // [query, key, value heads] of hidden: one for all, or several side by side, and null for the rest.
  const LinearWeights* qkv[kMostQkvParts];
  const LinearWeights* attention_output;  // hidden of query heads
  const LinearWeights* gated;             // intermediate of hidden
  const LinearWeights* down;              // hidden of intermediate
  const float* input_norm;
  const float* query_norm;  // of each head
  const float* key_norm;
  const float* post_attention_norm;
  const float* mlp_norm;
  const float* post_mlp_norm;
  const float* cos;  // [num_positions, rotary_half]
  const float* sin;
  int64_t rotary_half;
  int64_t window;  // keys that a token sees; 0: all
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers;
  int64_t hidden;
  int64_t num_heads;
  const float* norm;
  float norm_eps;
  float attention_scale;
  float attention_softcap;  // 0: none
  float residual_multiplier;
};

// The tokens of kernels/attention_metadata.py, and which of them are wanted.
struct DecoderStep {
  const int64_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t max_blocks;
  int64_t num_tokens;
  int64_t num_seqs;
  const int64_t* rows;  // [num_rows]: tokens whose last hidden states are wanted
  int64_t num_rows;     // may be 0, or repeat tokens
};
