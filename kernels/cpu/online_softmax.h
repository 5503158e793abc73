// Softmax of rows whose scores come in parts (Milakov and Gimelshein 2018, arXiv 1805.02867). Scores are logarithms to
// base 2: log2(e) is a part of the scale that queries are multiplied with.
#pragma once

#include <limits>

#include "vector.h"

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// Those of a part's keys, counted from its first one, that are seen: [begin, end).
struct Seen {
  int begin, end;
  bool is_empty() const { return begin >= end; }
  // The whole vectors that hold them.
  int first_vector() const { return begin / kLanes * kLanes; }
  int end_vector() const { return (end + kLanes - 1) / kLanes * kLanes; }
};

// Puts `otherwise` where a vector that is seen in part is not seen.
inline void mask_edges(float* numbers, Seen seen, float otherwise) {
  IntVector lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  const auto mask = [&](int at) {
    const IntVector position = lanes + at;
    const Vector kept = load(numbers + at);
    store(numbers + at, (position >= seen.begin) & (position < seen.end) ? kept : broadcast(otherwise));
  };
  if (seen.begin % kLanes) mask(seen.first_vector());
  if (seen.end % kLanes) mask(seen.end_vector() - kLanes);
}

inline void scale_seen(float* numbers, Seen seen, const float* scales) {
  for (int i = seen.first_vector(); i < seen.end_vector(); i += kLanes)
    store(numbers + i, load(numbers + i) * load(scales + i));
}

// Makes a row's scores ready for `weigh`: times `scales` unless that is null, capped (`softcap` is in natural units, 0:
// not), -inf at the edges. Returns the largest that is seen; -inf if none is.
inline float prepare_scores(float* scores, Seen seen, float softcap, const float* scales) {
  if (seen.is_empty()) return -kInfinity;
  if (scales) scale_seen(scores, seen, scales);
  if (softcap != 0.0f) {
    const float cap = softcap * kLog2E;
    for (int i = seen.first_vector(); i < seen.end_vector(); i += kLanes)
      store(scores + i, cap * hyperbolic_tangent(load(scores + i) / cap));
  }
  mask_edges(scores, seen, -kInfinity);
  Vector best = load(scores + seen.first_vector());
  for (int i = seen.first_vector() + kLanes; i < seen.end_vector(); i += kLanes) best = larger(best, load(scores + i));
  return largest(best);
}

// Scores become 2^(score - maximum), times `scales` unless that is null; what the row does not see of `wanted`'s
// vectors becomes 0. Returns the sum of the weights, before the scales.
inline float weigh(float* scores, Seen seen, float maximum, const float* scales, Seen wanted) {
  if (seen.is_empty()) seen = {wanted.first_vector(), wanted.first_vector()};
  for (int i = wanted.first_vector(); i < seen.first_vector(); i += kLanes) store(scores + i, Vector{});
  for (int i = seen.end_vector(); i < wanted.end_vector(); i += kLanes) store(scores + i, Vector{});
  const float subtracted = maximum == -kInfinity ? 0.0f : maximum;  // -inf - -inf would be NaN
  Vector total{};
  for (int i = seen.first_vector(); i < seen.end_vector(); i += kLanes) {
    const Vector weight = power_of_2(load(scores + i) - subtracted);
    total += weight;
    store(scores + i, weight);
  }
  if (scales) {
    scale_seen(scores, seen, scales);
    mask_edges(scores, seen, 0.0f);  // the scales of what is not seen may be NaN
  }
  return sum(total);
}

// What is known of each row after some of its parts, or of one. Rows are padded to whole vectors.
struct RowStates {
  float* maxima;
  float* totals;
};

inline void clear_states(const RowStates& states, int num_rows) {
  for (int row = 0; row < num_rows; row += kLanes) {
    store(states.maxima + row, broadcast(-kInfinity));
    store(states.totals + row, Vector{});
  }
}

// Takes a part in; says how weighted values are to be put together.
inline void fold_states(const RowStates& states, const RowStates& part, int num_rows, float* shrink, float* grow) {
  for (int row = 0; row < num_rows; row += kLanes) {
    const Vector before = load(states.maxima + row), here = load(part.maxima + row);
    const Vector maximum = larger(before, here);
    const Vector subtracted = maximum == broadcast(-kInfinity) ? Vector{} : maximum;
    const Vector of_before = power_of_2(before - subtracted), of_here = power_of_2(here - subtracted);
    const Vector total_before = load(states.totals + row) * of_before;
    store(shrink + row, of_before);
    store(grow + row, of_here);
    store(states.maxima + row, maximum);
    store(states.totals + row, fused_multiply_add(load(part.totals + row), of_here, total_before));
  }
}
