// RMSNorm of one row (arXiv 1910.07467).
#pragma once

#include <cmath>
#include <cstdint>

#include "vector.h"

inline float sum_of_squares(const float* x, int64_t width) {
  Vector total{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) total += load(x + i) * load(x + i);
  float result = sum(total);
  for (; i < width; ++i) result += x[i] * x[i];
  return result;
}

// `output` may be `x`.
inline void rms_norm_row(const float* x, const float* weight, int64_t width, float eps, float* output) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
  for (int64_t i = 0; i < width; ++i) output[i] = x[i] * factor * weight[i];
}
