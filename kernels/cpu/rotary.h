// Rotary position embedding of one head (arXiv 2104.09864), in the halves layout.
#pragma once

#include <cstdint>

inline void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; ++d) {
    const float first = head[d], second = head[d + half];
    head[d] = first * cos[d] - second * sin[d];
    head[d + half] = second * cos[d] + first * sin[d];
  }
}
