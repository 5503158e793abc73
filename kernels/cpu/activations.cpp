#include "activations.h"

#include <cmath>
#include <cstring>

#include "norm.h"

namespace {

constexpr int64_t kMinBlockRows = 64;
constexpr int64_t kBlockBytes = 512 << 10;  // of quantised activations, so that they stay in L2
constexpr float kLargestActivation = 32767.0f;
constexpr float kSmallestMagnitude = 7.8886091e-31f;  // 2^-100: 32767 / x would overflow soon below it

template <class T>
T* grown(std::vector<T>& vector, int64_t size) {
  if (vector.size() < size_t(size)) vector.resize(size_t(size));
  return vector.data();
}

// Memory of a thread that lives from call to call: fresh pages cost more than the product of a small layer.
struct RowScratch {
  std::vector<float> normed;
  std::vector<int16_t> quantized;
};

RowScratch& row_scratch() {
  thread_local RowScratch of_this_thread;
  return of_this_thread;
}

// The bits of the largest magnitude: they order as the floats do, and infinity and NaN come last.
int32_t largest_bits(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Returns the scale.
float quantize_row(const float* x, int64_t num_inputs, int64_t padded_inputs, int16_t* values) {
  const int32_t bits = largest_bits(x, num_inputs);
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  const bool is_finite = bits < 0x7f800000;
  if (!is_finite || largest < kSmallestMagnitude) {
    std::memset(values, 0, size_t(padded_inputs) * sizeof(int16_t));
    return is_finite ? 0.0f : NAN;
  }
  const Floats factor = broadcast_float(kLargestActivation / largest);
  int64_t i = 0;
  for (; i + kIntLanes <= num_inputs; i += kIntLanes) store_rounded(values + i, multiply(load_floats(x + i), factor));
  if (i < padded_inputs) {
    float tail[kIntLanes] = {};
    int16_t rounded_tail[kIntLanes];
    std::memcpy(tail, x + i, size_t(num_inputs - i) * sizeof(float));
    store_rounded(rounded_tail, multiply(load_floats(tail), factor));
    std::memset(values + i, 0, size_t(padded_inputs - i) * sizeof(int16_t));
    std::memcpy(values + i, rounded_tail, size_t(num_inputs - i) * sizeof(int16_t));
  }
  return largest / kLargestActivation;
}

}  // namespace

int64_t block_rows(const Layout& layout) {
  const int64_t fitting = kBlockBytes / (layout.padded_inputs * int64_t(sizeof(int16_t)));
  return std::clamp(fitting / kTileRows * kTileRows, kMinBlockRows, kMaxBlockRows);
}

Activations LinearScratch::reserve(int64_t num_rows, const Layout& layout) {
  const int64_t rows = std::min(num_rows, block_rows(layout));
  const int64_t num_groups = layout.has_minimums ? layout.num_segments : 0;
  return {grown(values_, rows * layout.padded_inputs), grown(scales_, rows), grown(group_sums_, rows * num_groups),
          layout.padded_inputs, num_groups, rows};
}

void quantize_tile(const LinearInput& input, const Activations& target, int64_t tile, int64_t num_inputs) {
  int16_t* row = grown(row_scratch().quantized, target.num_inputs);
  float* normed = input.norm ? grown(row_scratch().normed, num_inputs) : nullptr;
  const int64_t first = target.first_row(tile), height = target.first_row(tile + 1) - first;
  int16_t* values = target.values + first * target.num_inputs;
  float* sums = target.group_sums + first * target.num_groups;
  for (int64_t r = 0; r < height; ++r) {
    int16_t* quantized = height == 1 ? values : row;
    const float* x = input.rows + (first + r) * input.stride;
    if (input.norm) {
      rms_norm_row(x, input.norm, num_inputs, input.norm_eps, normed);
      x = normed;
    }
    target.scales[first + r] = quantize_row(x, num_inputs, target.num_inputs, quantized);
    for (int64_t group = 0; group < target.num_groups; ++group) {
      int32_t total = 0;
      for (int64_t i = 0; i < kInputMultiple; ++i) total += quantized[group * kInputMultiple + i];
      sums[group * height + r] = float(total);
    }
    if (height == 1) return;
    for (int64_t i = 0; i < target.num_inputs; i += 2) std::memcpy(values + i * height + 2 * r, row + i, 4);
  }
}
