// The two matrix products of attention, for a block of up to kBlockRows query rows: scores = query * keys, and
// output = output * shrink + weights * values * grow. Each sum takes its dimensions, or keys, in their order, with one
// rounding for each: what a row gets does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fetcher.h"
#include "key_panel.h"
#include "paged_cache.h"
#include "vector.h"

constexpr int kPartKeys = 128;  // keys whose scores are held at once; a multiple of every kPanelKeys
constexpr int kBlockRows = 6;

// How many vectors side by side leave a register for each of their sums with `rows` rows.
constexpr int columns_beside(int rows) { return rows * 4 + 4 <= kRegisters ? 4 : 2; }

// A product goes through a panel, or through values, of kPanelKeys keys in about as many steps as a vector has numbers.
// Asking for four times what it takes meanwhile is early enough and measured best.
template <KVType kType>
constexpr int kFetchedLines = 4 * kPanelKeys * kStoredBytes<kType> / kLineBytes;

// In a loop: from an initialiser GCC makes a string instruction over memory.
template <int kRows, int kColumns>
inline __attribute__((always_inline)) void clear(Vector (&sums)[kRows][kColumns]) {
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Vector{};
}

// sums[r][c] += left(r) * right(c). The shorter side is held in registers while the other one passes: GCC does not
// find that out, and spills a sum.
template <int kRows, int kColumns, class Left, class Right>
inline __attribute__((always_inline)) void add_products(Vector (&sums)[kRows][kColumns], const Left& left,
                                                        const Right& right) {
  if constexpr (kRows < kColumns) {
    Vector held[kRows];
    for (int r = 0; r < kRows; ++r) held[r] = left(r);
    for (int c = 0; c < kColumns; ++c) {
      const Vector passing = right(c);
      for (int r = 0; r < kRows; ++r) sums[r][c] = fused_multiply_add(held[r], passing, sums[r][c]);
    }
  } else {
    Vector held[kColumns];
    for (int c = 0; c < kColumns; ++c) held[c] = right(c);
    for (int r = 0; r < kRows; ++r) {
      const Vector passing = left(r);
      for (int c = 0; c < kColumns; ++c) sums[r][c] = fused_multiply_add(passing, held[c], sums[r][c]);
    }
  }
}

// scores: [rows, kPartKeys], of kColumns vectors of keys. query: [rows, head_dim]. panel: [head_dim, kPanelKeys].
template <int kRows, int kColumns, int kLines>
inline void multiply_keys(const float* query, const float* panel, int head_dim, float* scores, Fetcher& fetcher) {
  Vector sums[kRows][kColumns];
  clear(sums);
  Fetcher local = fetcher;
  for (int d = 0; d < head_dim; ++d) {
    local.step<kLines>();
    add_products(
        sums, [&](int r) { return broadcast(query[int64_t(r) * head_dim + d]); },
        [&](int c) { return load(panel + int64_t(d) * kPanelKeys + c * kLanes); });
  }
  fetcher = local;
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) store(scores + r * kPartKeys + c * kLanes, sums[r][c]);
}

// As `multiply_keys`, of the panel's first `num_keys`, rounded up to whole vectors.
template <int kRows, int kLines>
inline void score_rows(const float* query, const float* panel, int head_dim, int num_keys, float* scores,
                       Fetcher& fetcher) {
  constexpr int kColumns = columns_beside(kRows);
  int key = 0;
  for (; key + (kColumns - 1) * kLanes < num_keys; key += kColumns * kLanes)
    multiply_keys<kRows, kColumns, kLines>(query, panel + key, head_dim, scores + key, fetcher);
  for (; key < num_keys; key += kLanes)
    multiply_keys<kRows, 1, kLines>(query, panel + key, head_dim, scores + key, fetcher);
}

// How a row's weighted values are put together with those of its keys before.
struct Fold {
  const float* shrink;  // [rows]: of what is there
  const float* grow;    // [rows]: of what is new
};

inline Vector folded(Vector before, Vector here, float shrink, float grow) {
  return fused_multiply_add(here, broadcast(grow), before * broadcast(shrink));
}

// Values as they lie in the cache.
template <KVType kType>
struct StoredValues {
  const char* const* runs;
  int64_t bytes;  // of a vector

  const char* vector(int key) const { return runs[key / kRunKeys] + key % kRunKeys * bytes; }
  int run_end(int key, int end) const { return std::min(end, (key / kRunKeys + 1) * kRunKeys); }
  static Vector load(const char* vector, int first) { return load_stored<kType>(vector, first); }
};

// Values as floats, [kPartKeys, padded_dim].
struct CopiedValues {
  const float* numbers;
  int64_t bytes;

  const char* vector(int key) const { return reinterpret_cast<const char*>(numbers) + key * bytes; }
  static int run_end(int, int end) { return end; }
  static Vector load(const char* vector, int first) {
    return ::load(reinterpret_cast<const float*>(vector) + first);
  }
};

// output: [rows, padded_dim], kColumns vectors of it from number `first` on. weights: [rows, kPartKeys].
template <int kRows, int kColumns, int kLines, class Values>
inline void multiply_values(const float* weights, const Values& values, int first, int begin, int end, const Fold& fold,
                            float* output, int padded_dim, Fetcher& fetcher) {
  Vector sums[kRows][kColumns];
  clear(sums);
  Fetcher local = fetcher;
  for (int key = begin; key < end;) {
    const char* vector = values.vector(key);
    for (const int run_end = values.run_end(key, end); key < run_end; ++key, vector += values.bytes) {
      local.step<kLines>();
      add_products(
          sums, [&](int r) { return broadcast(weights[r * kPartKeys + key]); },
          [&](int c) { return Values::load(vector, first + c * kLanes); });
    }
  }
  fetcher = local;
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) {
      float* target = output + int64_t(r) * padded_dim + first + c * kLanes;
      store(target, folded(load(target), sums[r][c], fold.shrink[r], fold.grow[r]));
    }
}

// The keys [begin, end) of a part.
template <int kRows, int kLines, class Values>
inline void weigh_values(const float* weights, const Values& values, int begin, int end, const Fold& fold,
                         float* output, int padded_dim, Fetcher& fetcher) {
  constexpr int kColumns = columns_beside(kRows);
  int d = 0;
  for (; d + kColumns * kLanes <= padded_dim; d += kColumns * kLanes)
    multiply_values<kRows, kColumns, kLines>(weights, values, d, begin, end, fold, output, padded_dim, fetcher);
  for (; d < padded_dim; d += kLanes)
    multiply_values<kRows, 1, kLines>(weights, values, d, begin, end, fold, output, padded_dim, fetcher);
}

// body(number of rows, as a type; first row) for blocks of nearly equal size.
template <class Body>
inline void for_blocks(int num_rows, const Body& body) {
  const int num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  for (int block = 0, row = 0; block < num_blocks; ++block) {
    const int count = (num_rows - row + num_blocks - block - 1) / (num_blocks - block);
    switch (count) {
      case 1: body(std::integral_constant<int, 1>{}, row); break;
      case 2: body(std::integral_constant<int, 2>{}, row); break;
      case 3: body(std::integral_constant<int, 3>{}, row); break;
      case 4: body(std::integral_constant<int, 4>{}, row); break;
      case 5: body(std::integral_constant<int, 5>{}, row); break;
      default: body(std::integral_constant<int, kBlockRows>{}, row);
    }
    row += count;
  }
}
