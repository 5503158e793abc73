// The functions that kernels/cpu/operators.py calls through ctypes: raw pointers, sizes, strides in
// floats. No torch types, so that a library outlives a change of torch's ABI. Threads come from
// OpenMP: torch's own threads, since torch has loaded the same runtime. A second pool would fight with
// them for the cores.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "vector.h"

namespace {

constexpr int64_t kParallelFloats = 1 << 15;  // below this, waking a thread costs more than it saves

float sum_of_squares(const float* x, int64_t width) {
  Vector total{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) total += load(x + i) * load(x + i);
  float result = sum(total);
  for (; i < width; ++i) result += x[i] * x[i];
  return result;
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; ++d) {
    const float first = head[d], second = head[d + half];
    head[d] = first * cos[d] - second * sin[d];
    head[d + half] = second * cos[d] + first * sin[d];
  }
}

}  // namespace

extern "C" {

// residual may be null; else residual += x first, and the sum is what is normalised.
void headrace_rms_norm(const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                       const float* weight, float* output, int64_t num_rows, int64_t width, float eps,
                       int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width >= kParallelFloats)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* source = x + row * x_stride;
    if (residual) {
      float* running = residual + row * residual_stride;
      for (int64_t i = 0; i < width; ++i) running[i] += source[i];
      source = running;
    }
    const float factor = 1.0f / std::sqrt(sum_of_squares(source, width) / float(width) + eps);
    float* target = output + row * width;
    for (int64_t i = 0; i < width; ++i) target[i] = source[i] * factor * weight[i];
  }
}

void headrace_rotary(float* query, int64_t query_stride, int64_t num_heads, float* key, int64_t key_stride,
                     int64_t num_kv_heads, const int64_t* positions, const float* cos, const float* sin,
                     int64_t num_tokens, int64_t head_dim, int64_t half, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * head_dim >= kParallelFloats)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float* cos_row = cos + positions[token] * half;
    const float* sin_row = sin + positions[token] * half;
    for (int64_t head = 0; head < num_heads; ++head)
      rotate(query + token * query_stride + head * head_dim, cos_row, sin_row, half);
    for (int64_t head = 0; head < num_kv_heads; ++head)
      rotate(key + token * key_stride + head * head_dim, cos_row, sin_row, half);
  }
}

void headrace_silu_and_mul(const float* gate_up, int64_t stride, float* output, int64_t num_rows, int64_t width,
                           int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width >= kParallelFloats)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* gate = gate_up + row * stride;
    const float* up = gate + width;
    float* target = output + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Vector g = load(gate + i);
      store(target + i, g / (1.0f + exponential(smaller(-g, broadcast(88.0f)))) * load(up + i));
    }
    for (; i < width; ++i) target[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
}

void headrace_gelu_tanh_and_mul(const float* gate_up, int64_t stride, float* output, int64_t num_rows,
                                int64_t width, int num_threads) {
  constexpr float kRoot = 0.79788456f;  // sqrt(2 / pi)
#pragma omp parallel for num_threads(num_threads) if (num_rows * width >= kParallelFloats)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* gate = gate_up + row * stride;
    const float* up = gate + width;
    float* target = output + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Vector g = load(gate + i);
      store(target + i, g * 0.5f * (1.0f + hyperbolic_tangent(kRoot * (g + 0.044715f * g * g * g))) * load(up + i));
    }
    for (; i < width; ++i) {
      const float g = gate[i];
      target[i] = g * 0.5f * (1.0f + std::tanh(kRoot * (g + 0.044715f * g * g * g))) * up[i];
    }
  }
}

void headrace_write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                       float* key_cache, float* value_cache, const int64_t* slots, int64_t num_tokens,
                       int64_t num_kv_heads, int64_t block_size, int64_t head_dim) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const int64_t target = ((block * num_kv_heads + head) * block_size + offset) * head_dim;
      std::memcpy(key_cache + target, key + token * key_stride + head * head_dim, head_dim * sizeof(float));
      std::memcpy(value_cache + target, value + token * value_stride + head * head_dim,
                  head_dim * sizeof(float));
    }
  }
}

void headrace_paged_attention(const float* query, int64_t query_stride, const float* keys, const float* values,
                              float* output, const int32_t* query_start, const int32_t* context_lens,
                              const int32_t* block_tables, int64_t max_blocks, int num_seqs, int num_heads,
                              int num_kv_heads, int head_dim, int block_size, int window, float scale,
                              float softcap, int num_threads) {
  paged_attention({query, query_stride, keys, values, output, query_start, context_lens, block_tables, max_blocks,
                   num_seqs, num_heads, num_kv_heads, head_dim, block_size, window, scale, softcap},
                  num_threads);
}

}  // extern "C"
