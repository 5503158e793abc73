// The functions that kernels/cpu/operators.py calls through ctypes: raw pointers, sizes, strides in
// floats. No torch types, so that a library outlives a change of torch's ABI.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "gates.h"
#include "norm.h"
#include "rotary.h"
#include "team.h"
#include "vector.h"

namespace {

constexpr int64_t kParallelFloats = 1 << 15;  // below this, waking a thread costs more than it saves

// body(row) for all rows, by all threads where there is enough to do.
template <class Body>
void for_rows(Team* team, int64_t num_rows, int64_t floats_per_row, const Body& body) {
  if (num_rows * floats_per_row < kParallelFloats) {
    for (int64_t row = 0; row < num_rows; ++row) body(row);
    return;
  }
  team->each(num_rows, [&](Range range) {
    for (int64_t row = range.first; row < range.end; ++row) body(row);
  });
}

float gated(Gate gate, float g, float up) {
  constexpr float kRoot = 0.79788456f;
  if (gate == kSilu) return g / (1.0f + std::exp(-g)) * up;
  return g * 0.5f * (1.0f + std::tanh(kRoot * (g + 0.044715f * g * g * g))) * up;
}

void gate_rows(Team* team, Gate gate, const float* gate_up, int64_t stride, float* output, int64_t num_rows,
               int64_t width) {
  for_rows(team, num_rows, width, [&](int64_t row) {
    const float* gates = gate_up + row * stride;
    float* target = output + row * width;
    const int64_t even = width / kLanes * kLanes;
    std::memcpy(target, gates, size_t(even) * sizeof(float));
    apply_gate(gate, target, gates + width, even);
    for (int64_t i = even; i < width; ++i) target[i] = gated(gate, gates[i], gates[width + i]);
  });
}

}  // namespace

extern "C" {

// residual may be null; else residual += x first, and the sum is what is normalised.
void headrace_rms_norm(Team* team, const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                       const float* weight, float* output, int64_t num_rows, int64_t width, float eps) {
  for_rows(team, num_rows, width, [&](int64_t row) {
    const float* source = x + row * x_stride;
    if (residual) {
      float* running = residual + row * residual_stride;
      for (int64_t i = 0; i < width; ++i) running[i] += source[i];
      source = running;
    }
    rms_norm_row(source, weight, width, eps, output + row * width);
  });
}

void headrace_rotary(Team* team, float* query, int64_t query_stride, int64_t num_heads, float* key,
                     int64_t key_stride, int64_t num_kv_heads, const int64_t* positions, const float* cos,
                     const float* sin, int64_t num_tokens, int64_t head_dim, int64_t half) {
  for_rows(team, num_tokens, num_heads * head_dim, [&](int64_t token) {
    const float* cos_row = cos + positions[token] * half;
    const float* sin_row = sin + positions[token] * half;
    for (int64_t head = 0; head < num_heads; ++head)
      rotate(query + token * query_stride + head * head_dim, cos_row, sin_row, half);
    for (int64_t head = 0; head < num_kv_heads; ++head)
      rotate(key + token * key_stride + head * head_dim, cos_row, sin_row, half);
  });
}

void headrace_silu_and_mul(Team* team, const float* gate_up, int64_t stride, float* output, int64_t num_rows,
                           int64_t width) {
  gate_rows(team, kSilu, gate_up, stride, output, num_rows, width);
}

void headrace_gelu_tanh_and_mul(Team* team, const float* gate_up, int64_t stride, float* output, int64_t num_rows,
                                int64_t width) {
  gate_rows(team, kGeluTanh, gate_up, stride, output, num_rows, width);
}

void headrace_write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                       const PagedCache* cache, const int64_t* slots, int64_t num_tokens) {
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t head = 0; head < cache->num_kv_heads; ++head)
      write_kv(*cache, slots[token], head, key + token * key_stride + head * cache->head_dim,
               value + token * value_stride + head * cache->head_dim);
}

void headrace_paged_attention(Team* team, const float* query, int64_t query_stride, const PagedCache* cache,
                              float* output, const int32_t* query_start, const int32_t* context_lens,
                              const int32_t* block_tables, int64_t max_blocks, int num_seqs, int num_heads, int window,
                              float scale, float softcap) {
  const PagedAttention call{query,      query_stride, *cache,   output, query_start, context_lens, block_tables,
                            max_blocks, num_seqs,     num_heads, window, scale,       softcap};
  const AttentionItems items = attention_items(call);
  paged_attention(*team, call, items);
}

}  // extern "C"
