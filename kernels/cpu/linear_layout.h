// How a quantised weight lies in memory once it is packed.
//
// Outputs are cut into panels of kPanelWidth, inputs into segments: a group that shares a scale, or, with one scale per
// output, as many as int32 sums can hold. A panel is one contiguous run, in the order in which it is multiplied:
// [panel][segment]{scales, minimums, [pair of inputs][output][2]}. So one row streams through the weights once at the
// speed of memory, and many rows share a chunk of a panel that is expanded to int16 once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "integer_lanes.h"
#include "linear.h"

constexpr int kColumns = 3;  // registers of outputs side by side
constexpr int kPanelWidth = kColumns * kIntLanes;
constexpr int kInputMultiple = 32;  // inputs are padded with zeros to it
constexpr int kPairsPerStep = 4;
// 127 * 32767 * 512 is the last multiple of 32 inputs whose sum stays below 2^31.
constexpr int64_t kMaxSegment = 512;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

struct Layout {
  explicit Layout(const LinearWeights& weights)
      : has_channel_scales(weights.format == kInt8PerChannel),
        has_minimums(weights.format == kInt4Group32),
        padded_inputs(round_up(weights.num_inputs, kInputMultiple)) {
    switch (weights.format) {
      case kInt8PerChannel:
        segment = round_up(divide_up(padded_inputs, divide_up(padded_inputs, kMaxSegment)), kInputMultiple);
        break;
      case kInt8Group64:
        segment = 64;
        break;
      default:
        segment = 32;
    }
    num_segments = divide_up(padded_inputs, segment);
    header_bytes = has_channel_scales ? 0 : (has_minimums ? 2 : 1) * kPanelWidth * int64_t(sizeof(uint16_t));
    segment_bytes = header_bytes + segment * kPanelWidth / (has_minimums ? 2 : 1);
    channel_bytes = has_channel_scales ? kPanelWidth * int64_t(sizeof(float)) : 0;
    panel_bytes = channel_bytes + num_segments * header_bytes + padded_inputs * kPanelWidth / (has_minimums ? 2 : 1);
    num_features = weights.gate == kNoGate ? weights.num_outputs : weights.num_outputs / 2;
    panels_per_unit = weights.gate == kNoGate ? 1 : 2;
    num_units = divide_up(num_features, kPanelWidth);
  }

  int64_t num_pairs(int64_t index) const { return std::min(segment, padded_inputs - index * segment) / 2; }

  bool has_channel_scales;
  bool has_minimums;
  int64_t padded_inputs;
  int64_t segment;  // inputs in it; the last one may be shorter
  int64_t num_segments;
  int64_t header_bytes;
  int64_t segment_bytes;
  int64_t channel_bytes;
  int64_t panel_bytes;
  int64_t num_features;    // of the result
  int64_t panels_per_unit;  // a gate's panel lies beside the one that it gates
  int64_t num_units;
};

// The row of the weight that lane `lane` of a panel computes, or -1 for padding.
inline int64_t weight_row(const Layout& layout, int64_t panel, int64_t lane) {
  const int64_t feature = panel / layout.panels_per_unit * kPanelWidth + lane;
  if (feature >= layout.num_features) return -1;
  return feature + panel % layout.panels_per_unit * layout.num_features;
}
