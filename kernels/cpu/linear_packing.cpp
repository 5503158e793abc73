// Packing of quantised weights, and their way back; layout in linear_layout.h.
#include <cstring>

#include "linear.h"
#include "linear_layout.h"
#include "team.h"

namespace {

float half_at(const uint8_t* address) {
  uint16_t halves[kIntLanes] = {};
  float floats[kIntLanes];
  std::memcpy(halves, address, sizeof(uint16_t));
  store_floats(floats, load_halves(halves));
  return floats[0];
}

// The byte, and the shift in it, of a 4-bit value: a 16-bit word holds one input of the kPairsPerStep pairs of a step.
struct Nibble {
  Nibble(int64_t lane, int64_t i) {
    const int64_t step = i / (2 * kPairsPerStep), pair = i / 2 % kPairsPerStep;
    byte = step * kPairsPerStep * kPanelWidth + 4 * lane + 2 * (i % 2) + pair / 2;  // little endian
    shift = int(4 * (pair % 2));
  }
  int64_t byte;
  int shift;
};

int64_t byte_at(int64_t lane, int64_t i) { return i / 2 * 2 * kPanelWidth + 2 * lane + i % 2; }

// One row of the weight as floats, from the panel that holds it.
void unpack_row(const LinearWeights& weights, const Layout& layout, int64_t row, float* target) {
  const int64_t lane = row % kPanelWidth;
  const uint8_t* panel = weights.packed + row / kPanelWidth * layout.panel_bytes;
  float scale, minimum = 0.0f;
  if (layout.has_channel_scales) std::memcpy(&scale, panel + lane * sizeof(float), sizeof(scale));
  for (int64_t index = 0; index < layout.num_segments; ++index) {
    const uint8_t* segment = panel + layout.channel_bytes + index * layout.segment_bytes;
    if (!layout.has_channel_scales) scale = half_at(segment + 2 * lane);
    if (layout.has_minimums) minimum = half_at(segment + 2 * (kPanelWidth + lane));
    const uint8_t* data = segment + layout.header_bytes;
    const int64_t begin = index * layout.segment, count = std::min(layout.segment, weights.num_inputs - begin);
    for (int64_t i = 0; i < count; ++i) {
      if (layout.has_minimums) {
        const Nibble nibble(lane, i);
        target[begin + i] = scale * float(data[nibble.byte] >> nibble.shift & 15) + minimum;
      } else {
        target[begin + i] = scale * float(int8_t(data[byte_at(lane, i)]));
      }
    }
  }
}

void pack_segment(const LinearWeights& weights, const Layout& layout, int64_t panel, int64_t index,
                  const uint8_t* values, const uint16_t* scales, const uint16_t* minimums, uint8_t* target) {
  const int64_t begin = index * layout.segment;
  const int64_t length = std::min(layout.segment, layout.padded_inputs - begin);
  const int64_t bytes = layout.header_bytes + length * kPanelWidth / (layout.has_minimums ? 2 : 1);
  std::memset(target, 0, size_t(bytes));
  uint8_t* data = target + layout.header_bytes;
  for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
    const int64_t row = weight_row(layout, panel, lane);
    if (row < 0) continue;
    if (!layout.has_channel_scales)
      std::memcpy(target + 2 * lane, scales + row * layout.num_segments + index, 2);
    if (layout.has_minimums)
      std::memcpy(target + 2 * (kPanelWidth + lane), minimums + row * layout.num_segments + index, 2);
    const uint8_t* source = values + row * weights.num_inputs + begin;
    const int64_t count = std::min(length, weights.num_inputs - begin);
    if (layout.has_minimums) {
      for (int64_t i = 0; i < count; ++i) {
        const Nibble nibble(lane, i);
        data[nibble.byte] |= uint8_t((source[i] & 15) << nibble.shift);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) data[byte_at(lane, i)] = source[i];
    }
  }
}

}  // namespace

extern "C" {

int64_t headrace_linear_packed_bytes(const LinearWeights* weights) {
  const Layout layout(*weights);
  return layout.num_units * layout.panels_per_unit * layout.panel_bytes;
}

// values: int8 or uint8 [num_outputs, num_inputs]; scales and minimums: half [num_outputs, groups]; channel_scales:
// float [num_outputs]. Those that the format has not may be null. target has headrace_linear_packed_bytes.
void headrace_linear_pack(Team* team, const LinearWeights* weights, const uint8_t* values,
                          const uint16_t* scales, const uint16_t* minimums, const float* channel_scales,
                          uint8_t* target) {
  const Layout layout(*weights);
  const auto pack_panel = [&](int64_t panel) {
    uint8_t* to = target + panel * layout.panel_bytes;
    if (layout.has_channel_scales)
      for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
        const int64_t row = weight_row(layout, panel, lane);
        const float scale = row < 0 ? 0.0f : channel_scales[row];
        std::memcpy(to + lane * sizeof(float), &scale, sizeof(float));
      }
    to += layout.channel_bytes;
    for (int64_t index = 0; index < layout.num_segments; ++index)
      pack_segment(*weights, layout, panel, index, values, scales, minimums, to + index * layout.segment_bytes);
  };
  team->each(layout.num_units * layout.panels_per_unit, [&](Range panels) {
    for (int64_t panel = panels.first; panel < panels.end; ++panel) pack_panel(panel);
  });
}

// Rows of the weight as floats [num_rows, num_inputs]; of weights without a gate only.
void headrace_linear_rows(const LinearWeights* weights, const int64_t* rows, int64_t num_rows, float* output,
                          int64_t output_stride) {
  const Layout layout(*weights);
  for (int64_t i = 0; i < num_rows; ++i) unpack_row(*weights, layout, rows[i], output + i * output_stride);
}

}  // extern "C"
