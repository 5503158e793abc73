// Half precision (IEEE 754 binary16) as it lies in memory: the KV cache's.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

constexpr float kLargestFloat16 = 65504.0f;

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | magnitude << 13);  // infinite or NaN
  // Shifted into place, the exponent is 127 - 15 too small; the product mends that, also of subnormal numbers.
  return float_from_bits(sign | bits_of(float_from_bits(magnitude << 13) * 0x1p112f));
}

// To the nearest, ties to even.
inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);  // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more: infinite
  if (magnitude < 0x38800000) {  // below 2^-14 numbers lie 2^-24 apart: an addition rounds to that
    const float sum = float_from_bits(magnitude) + 0.5f;
    return uint16_t(sign | (bits_of(sum) - bits_of(0.5f)));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return uint16_t(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
}

inline Vector load_float16(const uint16_t* address) {
#if defined(__AVX512F__)
  return Vector(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address))));
#elif defined(__F16C__)
  return Vector(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address))));
#elif defined(__aarch64__)
  return Vector(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(address))));
#else
  Vector value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = from_float16(address[lane]);
  return value;
#endif
}

// To the nearest, ties to even.
inline void store_float16(uint16_t* address, Vector value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address),
                      _mm512_cvtps_ph(__m512(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(address), _mm256_cvtps_ph(__m256(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(address, vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(value))));
#else
  for (int lane = 0; lane < kLanes; ++lane) address[lane] = to_float16(value[lane]);
#endif
}
