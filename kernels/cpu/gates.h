// The activations of gated layers.
#pragma once

#include "linear.h"
#include "vector.h"

// gates = gate(gates) * up; `count` is a multiple of kLanes.
inline void apply_gate(Gate gate, float* gates, const float* up, int64_t count) {
  constexpr float kRoot = 0.79788456f;  // sqrt(2 / pi)
  constexpr float kLargest = 80.0f;  // beyond it the inverse of e^x is subnormal, which takes processors a hundred cycles
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector g = load(gates + i);
    const Vector factor = gate == kSilu ? 1.0f / (1.0f + exponential(smaller(-g, broadcast(kLargest))))
                                        : 0.5f * (1.0f + hyperbolic_tangent(kRoot * (g + 0.044715f * g * g * g)));
    store(gates + i, g * factor * load(up + i));
  }
}
