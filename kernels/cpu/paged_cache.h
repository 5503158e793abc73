// The paged KV cache of one layer, and how a vector lies in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "float16.h"
#include "vector.h"

// kInt8: head_dim bytes, then a float by which they are to be multiplied; not aligned.
enum KVType : int32_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

template <KVType kType>
constexpr int kStoredBytes = kType == kFloat32 ? 4 : kType == kFloat16 ? 2 : 1;  // of a number

// Read by kernels/cpu/native_decoder.py too, which fills it: keep the two alike.
struct PagedCache {
  void* keys;  // [num_blocks, num_kv_heads, block_size] vectors
  void* values;
  KVType type;
  int32_t num_kv_heads;
  int32_t block_size;
  int32_t head_dim;

  int64_t vector_bytes() const {
    return type == kFloat32 ? 4 * int64_t(head_dim) : type == kFloat16 ? 2 * int64_t(head_dim) : head_dim + 4;
  }

  // In bytes: where the block's vectors of a head begin.
  int64_t page(int64_t block, int64_t kv_head) const {
    return (block * num_kv_heads + kv_head) * block_size * vector_bytes();
  }
};

// What an int8 vector's numbers are multiplied with.
inline float int8_scale(const void* vector, int head_dim) {
  float scale;
  std::memcpy(&scale, static_cast<const char*>(vector) + head_dim, sizeof(scale));
  return scale;
}

// kLanes numbers of a stored vector, from number `first` on; those of an int8 vector without its scale.
template <KVType kType>
inline Vector load_stored(const void* vector, int first) {
  if constexpr (kType == kFloat32) {
    return load(static_cast<const float*>(vector) + first);
  } else if constexpr (kType == kFloat16) {
    return load_float16(static_cast<const uint16_t*>(vector) + first);
  } else {
    const int8_t* numbers = static_cast<const int8_t*>(vector) + first;
#if defined(__AVX512F__)
    return Vector(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)))));
#elif defined(__AVX2__)
    return Vector(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers)))));
#else
    Vector value;
    for (int lane = 0; lane < kLanes; ++lane) value[lane] = float(numbers[lane]);
    return value;
#endif
  }
}

template <KVType kType>
inline float stored_number(const void* vector, int index) {
  if constexpr (kType == kFloat32) return static_cast<const float*>(vector)[index];
  if constexpr (kType == kFloat16) return from_float16(static_cast<const uint16_t*>(vector)[index]);
  return float(static_cast<const int8_t*>(vector)[index]);
}

// Numbers too large for float16 become the largest that it has: an infinite key would spoil its whole sequence.
inline void store_vector_float16(const float* source, int head_dim, uint16_t* target) {
  const Vector limit = broadcast(kLargestFloat16);
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes)
    store_float16(target + d, larger(-limit, smaller(limit, load(source + d))));
  for (; d < head_dim; ++d) {
    const float value = source[d];
    target[d] = to_float16(std::fabs(value) > kLargestFloat16 ? std::copysign(kLargestFloat16, value) : value);
  }
}

// The largest magnitude becomes 127. A vector with a number that is not finite becomes NaN as a whole.
inline void store_vector_int8(const float* source, int head_dim, int8_t* target) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const int whole = head_dim / kLanes * kLanes;
  Vector best{}, poison{};  // poison: 0, or NaN
  for (int d = 0; d < whole; d += kLanes) {
    const Vector numbers = load(source + d);
    best = larger(larger(numbers, -numbers), best);
    poison += numbers * 0.0f;
  }
  float largest_magnitude = largest(best), is_poisoned = sum(poison);
  for (int d = whole; d < head_dim; ++d) {
    largest_magnitude = std::max(largest_magnitude, std::fabs(source[d]));
    is_poisoned += source[d] * 0.0f;
  }
  const float scale = is_poisoned == 0.0f ? largest_magnitude / 127.0f : NAN;
  std::memcpy(target + head_dim, &scale, sizeof(scale));
  if (!(scale >= __FLT_MIN__)) {  // NaN; or so small that its inverse may be infinite: as good as zero
    std::memset(target, 0, size_t(head_dim));
    return;
  }
  const float inverse = 1.0f / scale;
  for (int d = 0; d < whole; d += kLanes) {
    const Bytes bytes = __builtin_convertvector(nearest_integers(load(source + d) * inverse), Bytes);
    std::memcpy(target + d, &bytes, sizeof(bytes));
  }
  for (int d = whole; d < head_dim; ++d) target[d] = int8_t(std::nearbyint(source[d] * inverse));
}

// Stores one token's key and value of one head at `slot` = block * block_size + offset.
inline void write_kv(const PagedCache& cache, int64_t slot, int64_t kv_head, const float* key, const float* value) {
  const int64_t at = cache.page(slot / cache.block_size, kv_head) + slot % cache.block_size * cache.vector_bytes();
  const auto write = [&](const float* source, void* target) {
    if (cache.type == kFloat32)
      std::memcpy(target, source, size_t(cache.head_dim) * sizeof(float));
    else if (cache.type == kFloat16)
      store_vector_float16(source, cache.head_dim, static_cast<uint16_t*>(target));
    else
      store_vector_int8(source, cache.head_dim, static_cast<int8_t*>(target));
  };
  write(key, static_cast<char*>(cache.keys) + at);
  write(value, static_cast<char*>(cache.values) + at);
}
