// One SIMD register of 32-bit integers, each of which gathers products of pairs of 16-bit integers or of quads of bytes,
// and the float register of the same width.
//
// Quads are of weights of 0 .. 15 and of activations of -127 .. 127. Sums over up to 8 quads may be kept in 16-bit integers
// on the way: 8 * 2 * 15 * 127 is below 2^15. What they are multiplied by in the end is at most 32767, so that the product
// stays below 2^31; as a float it is rounded once, on every path.
//
// Intrinsics, unlike vector.h: compilers do not find vpmaddwd and vpdpwssd reliably. Where neither AVX2 nor AVX-512
// is compiled in, vector extensions as there, which every compiler turns into what the machine has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HEADRACE_LANES_AVX512
#include <immintrin.h>
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define HEADRACE_AMX
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEADRACE_LANES_AVX2
#include <immintrin.h>
#endif

// Forbids the compiler to regroup sums of sums: it would run out of registers.
#define HEADRACE_KEEP(constraint)                                            \
  template <class Register>                                                  \
  inline __attribute__((always_inline)) void keep_in_register(Register& r) { \
    asm("" : "+" constraint(r));                                             \
  }

#if defined(HEADRACE_LANES_AVX512)

HEADRACE_KEEP("v")
constexpr int kIntLanes = 16;
constexpr int kTileRows = 8;  // rows of activations whose sums stay in registers: 8 x 3 of 32
#if defined(__AVX512VNNI__)
constexpr bool kDotAccumulates = true;
#else
constexpr bool kDotAccumulates = false;
#endif
typedef __m512i Ints;
typedef __m512 Floats;

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints load_ints(const void* address) { return _mm512_loadu_si512(address); }
inline void store_ints(void* address, Ints value) { _mm512_storeu_si512(address, value); }
inline Ints widen_bytes(const uint8_t* address) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
}
inline Ints even_bytes(Ints packed) { return _mm512_srai_epi16(_mm512_slli_epi16(packed, 8), 8); }
inline Ints odd_bytes(Ints packed) { return _mm512_srai_epi16(packed, 8); }
template <int kIndex>
inline Ints nibbles(Ints packed) {
  const Ints shifted = kIndex == 0 ? packed : _mm512_srli_epi16(packed, 4 * kIndex);
  return kIndex == 3 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi16(15));
}
inline Ints low_nibbles(Ints packed) { return _mm512_and_si512(packed, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints packed) { return low_nibbles(_mm512_srli_epi16(packed, 4)); }
inline Ints broadcast_group(const uint8_t* address) {
  int32_t group;
  std::memcpy(&group, address, sizeof(group));
  return _mm512_set1_epi32(group);
}
inline Ints dot(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
inline Ints add_dot(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
#if defined(__AVX512VNNI__)
inline Ints dot_quads(Ints weights, Ints x) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, x); }
inline Ints add_dot_quads(Ints sum, Ints weights, Ints x) { return _mm512_dpbusd_epi32(sum, weights, x); }
typedef float QuadFactor;
inline QuadFactor quad_factor(int number) { return float(number); }
inline Floats times_factor(Ints sum, QuadFactor factor) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(factor));
}
#else
inline Ints dot_quads(Ints weights, Ints x) { return _mm512_maddubs_epi16(weights, x); }
inline Ints add_dot_quads(Ints sum, Ints weights, Ints x) { return _mm512_add_epi16(sum, dot_quads(weights, x)); }
typedef int32_t QuadFactor;
inline QuadFactor quad_factor(int number) { return number << 16 | number; }
inline Floats times_factor(Ints sum, QuadFactor factor) {
  return _mm512_cvtepi32_ps(_mm512_madd_epi16(sum, _mm512_set1_epi32(factor)));
}
#endif
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
inline Floats low_bfloat16s(Ints pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Floats high_bfloat16s(Ints pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}
inline Floats broadcast_float(float value) { return _mm512_set1_ps(value); }
inline Floats load_floats(const float* address) { return _mm512_loadu_ps(address); }
inline void store_floats(float* address, Floats value) { _mm512_storeu_ps(address, value); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats add_floats(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats load_halves(const uint16_t* address) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
}
// To the nearest, ties to even; the caller keeps them within 16 bits.
inline void store_rounded(int16_t* address, Floats value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(value)));
}

#elif defined(HEADRACE_LANES_AVX2)

HEADRACE_KEEP("x")
constexpr int kIntLanes = 8;
constexpr int kTileRows = 4;  // 4 x 3 sums, 3 weights and one pair of activations fill the 16 registers
#if defined(__AVXVNNI__)
constexpr bool kDotAccumulates = true;
#else
constexpr bool kDotAccumulates = false;
#endif
typedef __m256i Ints;
typedef __m256 Floats;

inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Ints load_ints(const void* address) { return _mm256_loadu_si256(static_cast<const __m256i*>(address)); }
inline void store_ints(void* address, Ints value) { _mm256_storeu_si256(static_cast<__m256i*>(address), value); }
inline Ints widen_bytes(const uint8_t* address) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
}
inline Ints even_bytes(Ints packed) { return _mm256_srai_epi16(_mm256_slli_epi16(packed, 8), 8); }
inline Ints odd_bytes(Ints packed) { return _mm256_srai_epi16(packed, 8); }
template <int kIndex>
inline Ints nibbles(Ints packed) {
  const Ints shifted = kIndex == 0 ? packed : _mm256_srli_epi16(packed, 4 * kIndex);
  return kIndex == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15));
}
inline Ints low_nibbles(Ints packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints packed) { return low_nibbles(_mm256_srli_epi16(packed, 4)); }
inline Ints broadcast_group(const uint8_t* address) {
  int32_t group;
  std::memcpy(&group, address, sizeof(group));
  return _mm256_set1_epi32(group);
}
inline Ints dot(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
inline Ints add_dot(Ints sum, Ints a, Ints b) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
#if defined(__AVXVNNI__)
inline Ints dot_quads(Ints weights, Ints x) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), weights, x); }
inline Ints add_dot_quads(Ints sum, Ints weights, Ints x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
typedef float QuadFactor;
inline QuadFactor quad_factor(int number) { return float(number); }
inline Floats times_factor(Ints sum, QuadFactor factor) {
  return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(factor));
}
#else
inline Ints dot_quads(Ints weights, Ints x) { return _mm256_maddubs_epi16(weights, x); }
inline Ints add_dot_quads(Ints sum, Ints weights, Ints x) { return _mm256_add_epi16(sum, dot_quads(weights, x)); }
typedef int32_t QuadFactor;
inline QuadFactor quad_factor(int number) { return number << 16 | number; }
inline Floats times_factor(Ints sum, QuadFactor factor) {
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi32(factor)));
}
#endif
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
inline Floats low_bfloat16s(Ints pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Floats high_bfloat16s(Ints pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
}
inline Floats broadcast_float(float value) { return _mm256_set1_ps(value); }
inline Floats load_floats(const float* address) { return _mm256_loadu_ps(address); }
inline void store_floats(float* address, Floats value) { _mm256_storeu_ps(address, value); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats add_floats(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats load_halves(const uint16_t* address) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
}
inline void store_rounded(int16_t* address, Floats value) {
  const __m256i wide = _mm256_cvtps_epi32(value);
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(address), narrow);
}

#else

template <class Register>
inline void keep_in_register(Register&) {}
constexpr int kIntLanes = 4;
constexpr int kTileRows = 4;
constexpr bool kDotAccumulates = false;

typedef int32_t Ints __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(8)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef uint16_t Words __attribute__((vector_size(16)));
typedef uint32_t UnsignedInts __attribute__((vector_size(16)));

inline Ints zero_ints() { return Ints{}; }
inline Ints load_ints(const void* address) {
  Ints value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}
inline void store_ints(void* address, Ints value) { std::memcpy(address, &value, sizeof(value)); }
inline Ints widen_bytes(const uint8_t* address) {
  Bytes bytes;
  std::memcpy(&bytes, address, sizeof(bytes));
  return (Ints)__builtin_convertvector(bytes, Shorts);
}
inline Ints even_bytes(Ints packed) { return (Ints)((Shorts)((Words)packed << 8) >> 8); }
inline Ints odd_bytes(Ints packed) { return (Ints)((Shorts)packed >> 8); }
template <int kIndex>
inline Ints nibbles(Ints packed) {
  return (Ints)(((Words)packed >> (4 * kIndex)) & 15);
}
inline Ints low_nibbles(Ints packed) { return packed & 0x0f0f0f0f; }
inline Ints high_nibbles(Ints packed) { return packed >> 4 & 0x0f0f0f0f; }
inline Ints broadcast_group(const uint8_t* address) {
  int32_t group;
  std::memcpy(&group, address, sizeof(group));
  return Ints{} + group;
}
inline Ints dot(Ints a, Ints b) {
  const Ints low_a = (Ints)((UnsignedInts)a << 16) >> 16, low_b = (Ints)((UnsignedInts)b << 16) >> 16;
  return low_a * low_b + (a >> 16) * (b >> 16);
}
inline Ints add(Ints a, Ints b) { return a + b; }
inline Ints add_dot(Ints sum, Ints a, Ints b) { return sum + dot(a, b); }
inline Ints dot_quads(Ints weights, Ints x) {
  Ints sum{};
  for (int byte = 0; byte < 4; ++byte)
    sum += (weights >> 8 * byte & 255) * ((Ints)((UnsignedInts)x << (24 - 8 * byte)) >> 24);
  return sum;
}
inline Ints add_dot_quads(Ints sum, Ints weights, Ints x) { return sum + dot_quads(weights, x); }
typedef float QuadFactor;
inline QuadFactor quad_factor(int number) { return float(number); }
inline Floats times_factor(Ints sum, QuadFactor factor) { return __builtin_convertvector(sum, Floats) * factor; }
inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }
inline Floats low_bfloat16s(Ints pairs) { return (Floats)((UnsignedInts)pairs << 16); }
inline Floats high_bfloat16s(Ints pairs) { return (Floats)((UnsignedInts)pairs & 0xffff0000u); }
inline Floats broadcast_float(float value) { return Floats{} + value; }
inline Floats load_floats(const float* address) {
  Floats value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}
inline void store_floats(float* address, Floats value) { std::memcpy(address, &value, sizeof(value)); }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats add_floats(Floats a, Floats b) { return a + b; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline float half_to_float(uint16_t half) {
  const int exponent = (half >> 10) & 31, fraction = half & 1023;
  float magnitude;
  if (exponent == 31)
    magnitude = fraction ? NAN : INFINITY;
  else if (exponent == 0)
    magnitude = std::ldexp(float(fraction), -24);
  else
    magnitude = std::ldexp(float(1024 + fraction), exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}
inline Floats load_halves(const uint16_t* address) {
  Floats value;
  for (int lane = 0; lane < kIntLanes; ++lane) value[lane] = half_to_float(address[lane]);
  return value;
}
inline void store_rounded(int16_t* address, Floats value) {
  for (int lane = 0; lane < kIntLanes; ++lane) address[lane] = int16_t(std::nearbyint(value[lane]));
}

#endif

// 32 numbers times `factor`, rounded to bytes, as quads in the order of the nibbles of weights: of each eight inputs
// 0, 4, 1, 5 and 2, 6, 3, 7. To the nearest, ties to even; the caller keeps them within 8 bits.
inline void store_rounded_quads(int8_t* address, const float* x, float factor) {
#if defined(__AVX2__)
  const auto eight = [&](int index) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * index), _mm256_set1_ps(factor)));
  };
  const __m256i halves =
      _mm256_packs_epi16(_mm256_packs_epi32(eight(0), eight(1)), _mm256_packs_epi32(eight(2), eight(3)));
  const __m128i first = _mm256_castsi256_si128(halves), second = _mm256_extracti128_si256(halves, 1);
  __m128i* quads = reinterpret_cast<__m128i*>(address);
  _mm_storeu_si128(quads, _mm_unpacklo_epi8(first, second));
  _mm_storeu_si128(quads + 1, _mm_unpackhi_epi8(first, second));
#else
  constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  for (int i = 0; i < 32; ++i) address[i] = int8_t(std::nearbyint(x[i / 8 * 8 + kOrder[i % 8]] * factor));
#endif
}
