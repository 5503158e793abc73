// Keys as columns: the stored vectors of some keys, turned so that a register holds the same dimension of kLanes keys.
// Then a score is one sum over the dimensions in their order, whatever is computed beside it.
#pragma once

#include <cstdint>
#include <cstring>

#include "paged_cache.h"
#include "vector.h"

constexpr int kRunKeys = 16;            // vectors that lie one behind the other; what keys are turned by
constexpr int kPanelKeys = 4 * kLanes;  // of a panel [head_dim, kPanelKeys]

namespace key_panel {

// The numbers from `first` on of `count` keys, one at a time.
template <KVType kType>
__attribute__((noinline)) void turn_numbers(const char* keys, int64_t bytes, int count, int first, int head_dim,
                                            float* panel) {
  for (int key = 0; key < count; ++key)
    for (int d = first; d < head_dim; ++d)
      panel[int64_t(d) * kPanelKeys + key] = stored_number<kType>(keys + key * bytes, d);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HEADRACE_TURNS_REGISTERS

typedef __m512i Register;

// 16 bytes at `address`, one and two steps behind it, and so on.
inline Register gather(const char* address, int64_t step, const char* second, int64_t second_step) {
  const auto part = [](const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  const __m512i low = _mm512_inserti32x4(_mm512_castsi128_si512(part(address)), part(address + step), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(low, part(second), 2), part(second + second_step), 3);
}
inline Register low_words(Register a, Register b) { return _mm512_unpacklo_epi16(a, b); }
inline Register high_words(Register a, Register b) { return _mm512_unpackhi_epi16(a, b); }
inline Register low_doubles(Register a, Register b) { return _mm512_unpacklo_epi32(a, b); }
inline Register high_doubles(Register a, Register b) { return _mm512_unpackhi_epi32(a, b); }
inline Register low_quads(Register a, Register b) { return _mm512_unpacklo_epi64(a, b); }
inline Register high_quads(Register a, Register b) { return _mm512_unpackhi_epi64(a, b); }
template <int kByte>
inline Vector byte_as_float(Register a) {
  const Register high = kByte == 3 ? a : _mm512_slli_epi32(a, 24 - 8 * kByte);
  return Vector(_mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24)));
}

#elif defined(__AVX2__) && !defined(__AVX512F__)
#define HEADRACE_TURNS_REGISTERS

typedef __m256i Register;

inline Register gather(const char* address, int64_t step, const char*, int64_t) {
  const auto part = [](const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(part(address)), part(address + step), 1);
}
inline Register low_words(Register a, Register b) { return _mm256_unpacklo_epi16(a, b); }
inline Register high_words(Register a, Register b) { return _mm256_unpackhi_epi16(a, b); }
inline Register low_doubles(Register a, Register b) { return _mm256_unpacklo_epi32(a, b); }
inline Register high_doubles(Register a, Register b) { return _mm256_unpackhi_epi32(a, b); }
inline Register low_quads(Register a, Register b) { return _mm256_unpacklo_epi64(a, b); }
inline Register high_quads(Register a, Register b) { return _mm256_unpackhi_epi64(a, b); }
template <int kByte>
inline Vector byte_as_float(Register a) {
  const Register high = kByte == 3 ? a : _mm256_slli_epi32(a, 24 - 8 * kByte);
  return Vector(_mm256_cvtepi32_ps(_mm256_srai_epi32(high, 24)));
}

#endif

#if defined(HEADRACE_TURNS_REGISTERS)

// In each 16 bytes of the registers: four keys of four 32-bit numbers become four numbers of four keys.
inline void turn_4x4(Register rows[4]) {
  const Register a = low_doubles(rows[0], rows[1]), b = high_doubles(rows[0], rows[1]);
  const Register c = low_doubles(rows[2], rows[3]), d = high_doubles(rows[2], rows[3]);
  rows[0] = low_quads(a, c), rows[1] = high_quads(a, c), rows[2] = low_quads(b, d), rows[3] = high_quads(b, d);
}

inline void store_column(float* panel, int d, Vector value) { store(panel + int64_t(d) * kPanelKeys, value); }

// kLanes keys, kLanes at most kRunKeys.
inline int turn_floats(const char* keys, int64_t bytes, int head_dim, float* panel) {
  int d = 0;
  for (; d + 4 <= head_dim; d += 4) {
    Register rows[4];
    for (int i = 0; i < 4; ++i) {
      const char* at = keys + i * bytes + d * int64_t(sizeof(float));
      rows[i] = gather(at, 4 * bytes, at + 8 * bytes, 4 * bytes);
    }
    turn_4x4(rows);
    for (int i = 0; i < 4; ++i) store_column(panel, d + i, Vector(rows[i]));
  }
  return d;
}

// 2 * kLanes keys, which are one run or, with registers of 64 bytes, two.
inline int turn_halves(const char* keys, const char* second, int64_t bytes, int head_dim, float* panel) {
  int d = 0;
  for (; d + 8 <= head_dim; d += 8) {
    Register rows[8], pairs[8];
    for (int i = 0; i < 8; ++i) {
      const int64_t at = i * bytes + d * int64_t(sizeof(uint16_t));
      rows[i] = gather(keys + at, 8 * bytes, second + at, 8 * bytes);
    }
    for (int i = 0; i < 4; ++i) {  // words of neighbouring keys side by side: 32-bit numbers
      pairs[i] = low_words(rows[2 * i], rows[2 * i + 1]);
      pairs[4 + i] = high_words(rows[2 * i], rows[2 * i + 1]);
    }
    turn_4x4(pairs), turn_4x4(pairs + 4);
    // Converted through memory: from there it is one instruction, from the upper half of a register three.
    alignas(64) uint16_t halves[8 * 2 * kLanes];
    std::memcpy(halves, pairs, sizeof(halves));
    for (int i = 0; i < 8; ++i) {
      store_column(panel, d + i, load_float16(halves + 2 * kLanes * i));
      store_column(panel + kLanes, d + i, load_float16(halves + 2 * kLanes * i + kLanes));
    }
  }
  return d;
}

// kLanes keys; their scales are left out.
inline int turn_bytes(const char* keys, int64_t bytes, int head_dim, float* panel) {
  int d = 0;
  for (; d + 16 <= head_dim; d += 16) {
    Register rows[4];
    for (int i = 0; i < 4; ++i) {
      const char* at = keys + i * bytes + d;
      rows[i] = gather(at, 4 * bytes, at + 8 * bytes, 4 * bytes);
    }
    turn_4x4(rows);
    for (int i = 0; i < 4; ++i) {
      store_column(panel, d + 4 * i, byte_as_float<0>(rows[i]));
      store_column(panel, d + 4 * i + 1, byte_as_float<1>(rows[i]));
      store_column(panel, d + 4 * i + 2, byte_as_float<2>(rows[i]));
      store_column(panel, d + 4 * i + 3, byte_as_float<3>(rows[i]));
    }
  }
  return d;
}

#endif

}  // namespace key_panel

// Turns `num_runs` runs, which fit into a panel; `bytes` is the size of a stored vector. Those of int8 come without
// their scales.
template <KVType kType>
inline void fill_key_panel(const char* const* runs, int num_runs, int64_t bytes, int head_dim, float* panel) {
  using namespace key_panel;
  for (int run = 0; run < num_runs; ++run) {
    const char* keys = runs[run];
    float* columns = panel + run * kRunKeys;
    int done = 0;
#if defined(HEADRACE_TURNS_REGISTERS)
    if constexpr (kType == kFloat16) {
      constexpr bool kTakesTwo = 2 * kLanes > kRunKeys;
      const char* second = kTakesTwo && run + 1 < num_runs ? runs[run + 1] : keys;
      done = head_dim / 8 * 8;
      if (!kTakesTwo || run % 2 == 0) turn_halves(keys, second, bytes, head_dim, columns);
    } else {
      for (int key = 0; key < kRunKeys; key += kLanes) {
        if constexpr (kType == kFloat32) done = turn_floats(keys + key * bytes, bytes, head_dim, columns + key);
        if constexpr (kType == kInt8) done = turn_bytes(keys + key * bytes, bytes, head_dim, columns + key);
      }
    }
#endif
    if (done < head_dim) turn_numbers<kType>(keys, bytes, kRunKeys, done, head_dim, columns);
  }
}
