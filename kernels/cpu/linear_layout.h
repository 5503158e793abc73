// How a weight lies in memory once it is packed.
//
// Outputs are cut into panels of kPanelWidth, inputs into segments, whose products are summed before they are added to
// the others: a group that shares a scale; with one scale per output, as many as int32 sums can hold; of floats, so many
// that the sum stays accurate. A panel is one contiguous run, in the order in which it is multiplied:
// [panel][segment]{scales, minimums, [pair of inputs][output][2]}, of float32 and float16 {[input][output]}. So one row
// streams through the weights once at the speed of memory, and many rows share a chunk of a panel that is expanded once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "integer_lanes.h"
#include "linear.h"

constexpr int kColumns = 3;  // registers of outputs side by side
constexpr int kPanelWidth = kColumns * kIntLanes;
constexpr int kInputMultiple = 32;    // inputs are padded with zeros to it,
constexpr int kChannelMultiple = 64;  // or to this where an output has one scale,
constexpr int kSmallestSegment = 16;  // or to nothing where segments have this length
constexpr int kPairsPerStep = 4;
#if defined(HEADRACE_AMX)
// 8-bit weights as [four inputs][output][4], in the order 0, 2, 1, 3: AMX reads them as they are, others get two pairs.
constexpr bool kBytesAreQuads = true;
constexpr int64_t kHeaderMultiple = 64;  // lines of the cache: AMX reads whole ones
#else
constexpr bool kBytesAreQuads = false;
constexpr int64_t kHeaderMultiple = 1;
#endif
// 127 * 32767 * 512 is the last multiple of 32 inputs whose sum stays below 2^31.
constexpr int64_t kMaxSegment = 512;
constexpr int64_t kMaxFloatSegment = 256;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

struct Layout {
  explicit Layout(const LinearWeights& weights)
      : format(weights.format),
        value_bits(bits_of(format)),
        is_float(value_bits > 8),
        has_channel_scales(format == WeightFormat::kInt8PerChannel),
        has_minimums(format == WeightFormat::kInt4Group32),
        has_byte_activations(has_minimums && weights.activation_bits == 8),
        num_inputs(weights.num_inputs),
        padded_inputs(round_up(num_inputs, multiple_of(format))),
        segment(segment_of(format, padded_inputs)) {
    num_segments = divide_up(padded_inputs, segment);
    const int64_t num_scales = is_float || has_channel_scales ? 0 : has_minimums ? 2 : 1;
    header_bytes = round_up(num_scales * kPanelWidth * int64_t(sizeof(uint16_t)), kHeaderMultiple);
    segment_bytes = header_bytes + data_bytes(segment);
    channel_bytes = has_channel_scales ? kPanelWidth * int64_t(sizeof(float)) : 0;
    panel_bytes = channel_bytes + num_segments * header_bytes + data_bytes(padded_inputs);
    num_features = weights.gate == kNoGate ? weights.num_outputs : weights.num_outputs / 2;
    panels_per_unit = weights.gate == kNoGate ? 1 : 2;
    num_units = divide_up(num_features, kPanelWidth);
  }

  int64_t length(int64_t index) const { return std::min(segment, padded_inputs - index * segment); }
  int64_t data_bytes(int64_t num_inputs) const { return num_inputs * kPanelWidth * value_bits / 8; }

  WeightFormat format;
  int64_t value_bits;
  bool is_float;
  bool has_channel_scales;
  bool has_minimums;
  bool has_byte_activations;
  int64_t num_inputs;
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

 private:
  static int64_t multiple_of(WeightFormat format) {
    if (format == WeightFormat::kInt8PerChannel) return kChannelMultiple;
    return format == WeightFormat::kInt8Group16 ? kSmallestSegment : kInputMultiple;
  }

  static int64_t bits_of(WeightFormat format) {
    switch (format) {
      case WeightFormat::kInt4Group32:
        return 4;
      case WeightFormat::kBfloat16:
      case WeightFormat::kFloat16:
        return 16;
      case WeightFormat::kFloat32:
        return 32;
      default:
        return 8;
    }
  }

  static int64_t segment_of(WeightFormat format, int64_t padded_inputs) {
    switch (format) {
      case WeightFormat::kInt8PerChannel:
        return equal_parts(padded_inputs, kMaxSegment, kChannelMultiple);
      case WeightFormat::kFloat32:
      case WeightFormat::kBfloat16:
      case WeightFormat::kFloat16:
        return equal_parts(padded_inputs, kMaxFloatSegment, kInputMultiple);
      case WeightFormat::kInt8Group64:
        return 64;
      case WeightFormat::kInt8Group16:
        return kSmallestSegment;
      default:
        return 32;
    }
  }

  static int64_t equal_parts(int64_t total, int64_t largest, int64_t multiple) {
    return round_up(divide_up(total, divide_up(total, largest)), multiple);
  }
};

// The row of the weight that lane `lane` of a panel computes, or -1 for padding.
inline int64_t weight_row(const Layout& layout, int64_t panel, int64_t lane) {
  const int64_t feature = panel / layout.panels_per_unit * kPanelWidth + lane;
  if (feature >= layout.num_features) return -1;
  return feature + panel % layout.panels_per_unit * layout.num_features;
}
