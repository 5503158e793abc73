// One SIMD register of floats, of whatever width the machine has, and the arithmetic we need on it.
//
// GCC and Clang vector extensions instead of intrinsics: the same source becomes AVX-512, AVX2, SSE
// or NEON under -march=native.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
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

inline float sum(Vector value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }

inline float largest(Vector value) {
  float best = value[0];
  for (int lane = 1; lane < kLanes; ++lane) best = value[lane] > best ? value[lane] : best;
  return best;
}

// e^x to about 2 units in the last place for x <= 88; 0 below -87.
// x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r (coefficients of e^r: Cephes, expf).
// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; needs strict float semantics,
// so this file must not be compiled with -ffast-math.
inline Vector exponential(Vector x) {
  const Vector magic = broadcast(12582912.0f);
  const IntVector is_zero = x < broadcast(-87.0f);
  x = larger(x, broadcast(-87.0f));
  const Vector rounded = x * 1.44269504f + magic;
  const Vector n = rounded - magic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  IntVector shift = (IntVector)rounded - (IntVector)magic;
  const Vector result = (Vector)((IntVector)p + (shift << 23));
  return is_zero ? Vector{} : result;
}

// tanh(x) = 1 - 2 / (e^2x + 1); the error is about 1e-7 absolute, so it grows relative to a tiny x.
inline Vector hyperbolic_tangent(Vector x) {
  return 1.0f - 2.0f / (exponential(smaller(2.0f * x, broadcast(88.0f))) + 1.0f);
}
