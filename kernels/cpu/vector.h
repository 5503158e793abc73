// One SIMD register of floats, of whatever width the machine has, and the arithmetic we need on it.
//
// GCC and Clang vector extensions: the same source becomes AVX-512, AVX2, SSE or NEON under -march=native. Intrinsics
// stand only where compilers do not find the instruction by themselves.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Vector load(const float* address) {  // no alignment needed
  Vector value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

inline void store(float* address, Vector value) { std::memcpy(address, &value, sizeof(value)); }

inline Vector broadcast(float value) { return value - Vector{}; }

// a * b + c, rounded once where the machine can. Not left to the compiler, which may contract the same sum in one
// place and not in another: results that must agree to the bit are computed with this.
inline Vector fused_multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return Vector(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX__) && defined(__FMA__)
  return Vector(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__aarch64__)
  return Vector(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
  return a * b + c;
#endif
}

#if defined(__SSE2__)
// combine(lane i, lane i + width / 2) until one lane is left.
template <class Combine>
inline float reduce(Vector value, const Combine& combine) {
#if defined(__AVX512F__)
  const __m256 half = combine(_mm512_castps512_ps256(__m512(value)),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(__m512(value)), 1)));
  const __m128 quarter = combine(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX__)
  const __m128 quarter = combine(_mm256_castps256_ps128(__m256(value)), _mm256_extractf128_ps(__m256(value), 1));
#else
  const __m128 quarter = __m128(value);
#endif
  const __m128 two = combine(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(combine(two, _mm_shuffle_ps(two, two, 1)));
}
inline float sum(Vector value) {
  return reduce(value, [](auto a, auto b) { return a + b; });
}
inline float largest(Vector value) {
  return reduce(value, [](auto a, auto b) { return a > b ? a : b; });
}
#else
inline float sum(Vector value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}
inline float largest(Vector value) {
  float best = value[0];
  for (int lane = 1; lane < kLanes; ++lane) best = value[lane] > best ? value[lane] : best;
  return best;
}
#endif

// Where one is NaN: b.
inline Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
  return Vector(_mm512_max_ps(__m512(a), __m512(b)));
#elif defined(__AVX__)
  return Vector(_mm256_max_ps(__m256(a), __m256(b)));
#else
  return a > b ? a : b;
#endif
}

// Where one is NaN: b.
inline Vector smaller(Vector a, Vector b) {
#if defined(__AVX512F__)
  return Vector(_mm512_min_ps(__m512(a), __m512(b)));
#elif defined(__AVX__)
  return Vector(_mm256_min_ps(__m256(a), __m256(b)));
#else
  return a < b ? a : b;
#endif
}

// Ties to even.
inline IntVector nearest_integers(Vector value) {
#if defined(__AVX512F__)
  return IntVector(_mm512_cvtps_epi32(__m512(value)));
#elif defined(__AVX__)
  return IntVector(_mm256_cvtps_epi32(__m256(value)));
#elif defined(__SSE2__)
  return IntVector(_mm_cvtps_epi32(__m128(value)));
#elif defined(__aarch64__)
  return IntVector(vcvtnq_s32_f32(float32x4_t(value)));
#else
  IntVector rounded;
  for (int lane = 0; lane < kLanes; ++lane) rounded[lane] = int32_t(__builtin_nearbyintf(value[lane]));
  return rounded;
#endif
}

// e^x to about 2 units in the last place for x <= 88; 0 below -87; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r (coefficients of e^r: Cephes, expf).
// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; needs strict float semantics,
// so this file must not be compiled with -ffast-math.
inline Vector exponential(Vector x) {
  const Vector magic = broadcast(12582912.0f);
  const IntVector is_zero = x < broadcast(-87.0f);
  x = larger(broadcast(-87.0f), x);
  const Vector rounded = fused_multiply_add(x, broadcast(1.44269504f), magic);
  const Vector n = rounded - magic;
  const Vector r = fused_multiply_add(n, broadcast(2.12194440e-4f), fused_multiply_add(n, broadcast(-0.693359375f), x));
  Vector p = broadcast(1.9875691500e-4f);
  p = fused_multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = fused_multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = fused_multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = fused_multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = fused_multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = fused_multiply_add(p, r * r, r) + 1.0f;
  const IntVector exponent = (IntVector)rounded - ((IntVector)magic - 127);
  const Vector result = p * (Vector)(exponent << 23);
  return is_zero ? Vector{} : result;
}

// 2^x to about 3 units in the last place for x < 128; exactly 1 for 0; 0 below -126.5; NaN stays NaN.
// As above, with a polynomial for 2^r, |r| <= 1/2, that is ours: least largest relative error, 1 fixed for r = 0.
inline Vector power_of_2(Vector x) {
  const Vector magic = broadcast(12582912.0f + 127.0f);
  x = larger(broadcast(-127.0f), x);
  const Vector rounded = x + magic;
  const Vector r = x - (rounded - magic);
  Vector p = broadcast(1.3264727e-3f);
  p = fused_multiply_add(p, r, broadcast(9.671513e-3f));
  p = fused_multiply_add(p, r, broadcast(5.5507336e-2f));
  p = fused_multiply_add(p, r, broadcast(2.4022242e-1f));
  p = fused_multiply_add(p, r, broadcast(6.93147e-1f));
  p = fused_multiply_add(p, r, broadcast(1.0f));
  return p * (Vector)((IntVector)rounded << 23);  // -127 becomes the exponent of 0
}

// tanh(x) = 1 - 2 / (e^2x + 1); the error is about 1e-7 absolute, so it grows relative to a tiny x.
inline Vector hyperbolic_tangent(Vector x) {
  return 1.0f - 2.0f / (exponential(smaller(broadcast(88.0f), 2.0f * x)) + 1.0f);
}
