// The paged KV cache of one layer.
#pragma once

#include <cstdint>
#include <cstring>

enum KVType : int32_t { kFloat32 = 0 };

// Read by kernels/cpu/native_decoder.py too, which fills it: keep the two alike.
struct PagedCache {
  void* keys;  // [num_blocks, num_kv_heads, block_size, head_dim]
  void* values;
  KVType type;
  int32_t num_kv_heads;
  int32_t block_size;
  int32_t head_dim;

  // In values, not bytes: where the block's vectors of a head begin.
  int64_t page(int64_t block, int64_t kv_head) const {
    return (block * num_kv_heads + kv_head) * block_size * head_dim;
  }
};

// Stores one token's key and value of one head at `slot` = block * block_size + offset.
inline void write_kv(const PagedCache& cache, int64_t slot, int64_t kv_head, const float* key, const float* value) {
  const int64_t at = cache.page(slot / cache.block_size, kv_head) + slot % cache.block_size * cache.head_dim;
  const size_t bytes = size_t(cache.head_dim) * sizeof(float);
  std::memcpy(static_cast<float*>(cache.keys) + at, key, bytes);
  std::memcpy(static_cast<float*>(cache.values) + at, value, bytes);
}
