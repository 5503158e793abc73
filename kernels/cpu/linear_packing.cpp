// Packing of weights, and their way back; layout in linear_layout.h.
#include <algorithm>
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

float bfloat16_at(const uint8_t* address) {
  uint16_t half;
  std::memcpy(&half, address, sizeof(half));
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
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

// Where input i of a lane lies in a segment, counted in values.

int64_t index_in_pairs(int64_t lane, int64_t i) { return i / 2 * 2 * kPanelWidth + 2 * lane + i % 2; }

int64_t index_in_rows(int64_t lane, int64_t i) { return i * kPanelWidth + lane; }

int64_t index_of_byte(int64_t lane, int64_t i) {
  if (kBytesAreQuads) return i / 4 * 4 * kPanelWidth + 4 * lane + 2 * (i % 2) + i / 2 % 2;
  return index_in_pairs(lane, i);
}

// The inputs of a lane in a segment.

template <class Value, class Index>
void place_values(const uint8_t* source, int64_t lane, int64_t count, uint8_t* data, const Index& index) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(data + index(lane, i) * sizeof(Value), source + i * sizeof(Value), sizeof(Value));
}

void place_nibbles(const uint8_t* source, int64_t lane, int64_t count, uint8_t* data) {
  for (int64_t i = 0; i < count; ++i) {
    const Nibble nibble(lane, i);
    data[nibble.byte] |= uint8_t((source[i] & 15) << nibble.shift);
  }
}

void place(WeightFormat format, const uint8_t* source, int64_t lane, int64_t count, uint8_t* data) {
  switch (format) {
    case WeightFormat::kInt4Group32:
      return place_nibbles(source, lane, count, data);
    case WeightFormat::kFloat32:
      return place_values<float>(source, lane, count, data, index_in_rows);
    case WeightFormat::kFloat16:
      return place_values<uint16_t>(source, lane, count, data, index_in_rows);
    case WeightFormat::kBfloat16:
      return place_values<uint16_t>(source, lane, count, data, index_in_pairs);
    default:
      return place_values<int8_t>(source, lane, count, data, index_of_byte);
  }
}

float value_at(WeightFormat format, const uint8_t* data, int64_t lane, int64_t i) {
  switch (format) {
    case WeightFormat::kInt4Group32: {
      const Nibble nibble(lane, i);
      return float(data[nibble.byte] >> nibble.shift & 15);
    }
    case WeightFormat::kFloat32: {
      float value;
      std::memcpy(&value, data + index_in_rows(lane, i) * sizeof(value), sizeof(value));
      return value;
    }
    case WeightFormat::kFloat16:
      return half_at(data + index_in_rows(lane, i) * sizeof(uint16_t));
    case WeightFormat::kBfloat16:
      return bfloat16_at(data + index_in_pairs(lane, i) * sizeof(uint16_t));
    default:
      return float(int8_t(data[index_of_byte(lane, i)]));
  }
}

// One row of the weight as floats, from the panel that holds it.
void unpack_row(const LinearWeights& weights, const Layout& layout, int64_t row, float* target) {
  const int64_t lane = row % kPanelWidth;
  const uint8_t* panel = weights.packed + row / kPanelWidth * layout.panel_bytes;
  float scale = 1.0f, minimum = 0.0f;
  if (layout.has_channel_scales) std::memcpy(&scale, panel + lane * sizeof(float), sizeof(scale));
  for (int64_t index = 0; index < layout.num_segments; ++index) {
    const uint8_t* segment = panel + layout.channel_bytes + index * layout.segment_bytes;
    if (layout.header_bytes > 0) scale = half_at(segment + 2 * lane);
    if (layout.has_minimums) minimum = half_at(segment + 2 * (kPanelWidth + lane));
    const uint8_t* data = segment + layout.header_bytes;
    const int64_t begin = index * layout.segment, count = std::min(layout.segment, weights.num_inputs - begin);
    for (int64_t i = 0; i < count; ++i) target[begin + i] = scale * value_at(layout.format, data, lane, i) + minimum;
  }
}

void pack_segment(const LinearWeights& weights, const Layout& layout, int64_t panel, int64_t index,
                  const uint8_t* values, const uint16_t* scales, const uint16_t* minimums, uint8_t* target) {
  const int64_t begin = index * layout.segment, length = layout.length(index);
  const int64_t count = std::min(length, weights.num_inputs - begin);
  std::memset(target, 0, size_t(layout.header_bytes + layout.data_bytes(length)));
  uint8_t* data = target + layout.header_bytes;
  for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
    const int64_t row = weight_row(layout, panel, lane);
    if (row < 0) continue;
    if (layout.header_bytes > 0) std::memcpy(target + 2 * lane, scales + row * layout.num_segments + index, 2);
    if (layout.has_minimums)
      std::memcpy(target + 2 * (kPanelWidth + lane), minimums + row * layout.num_segments + index, 2);
    const int64_t source_bytes = std::max<int64_t>(8, layout.value_bits) / 8;  // 4-bit values come in bytes
    place(layout.format, values + (row * weights.num_inputs + begin) * source_bytes, lane, count, data);
  }
}

}  // namespace

extern "C" {

int64_t headrace_linear_packed_bytes(const LinearWeights* weights) {
  const Layout layout(*weights);
  return layout.num_units * layout.panels_per_unit * layout.panel_bytes;
}

// values: int8, uint8 for 4 bits, or floats of the format, [num_outputs, num_inputs]; scales and minimums: half [num_outputs,
// groups]; channel_scales: float [num_outputs]. Those that the format has not may be null. target has
// headrace_linear_packed_bytes.
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
