#include "activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "amx_products.h"
#include "norm.h"

namespace {

constexpr int64_t kMinBlockRows = 64;
constexpr int64_t kBlockBytes = 256 << 10;  // of activations, so that they stay in L2
constexpr float kLargestActivation = 32767.0f, kLargestByte = 127.0f, kLargestFactor = 32767.0f;
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
  std::vector<int32_t> largest;
};

RowScratch& row_scratch() {
  thread_local RowScratch of_this_thread;
  return of_this_thread;
}

float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
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
  const float largest = as_float(bits);
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

// Row r of a tile.

void place_floats(const float* x, int64_t num_inputs, const Activations& target, int64_t tile, int64_t r) {
  const int64_t height = target.height(tile);
  float* values = reinterpret_cast<float*>(target.tile(tile));
  target.scales[target.first_row(tile) + r] = 1.0f;
  for (int64_t i = 0; i < num_inputs; ++i) values[i * height + r] = x[i];
  for (int64_t i = num_inputs; i < target.num_inputs; ++i) values[i * height + r] = 0.0f;
}

void place_integers(const float* x, int64_t num_inputs, const Layout& layout, const Activations& target, int64_t tile,
                    int64_t r) {
  const int64_t first = target.first_row(tile), height = target.height(tile);
  int16_t* values = reinterpret_cast<int16_t*>(target.tile(tile));
  int16_t* quantized = !target.is_amx() && height == 1 ? values : grown(row_scratch().quantized, target.num_inputs);
  target.scales[first + r] = quantize_row(x, num_inputs, target.num_inputs, quantized);
  float* sums = target.group_sums + first * target.num_groups;
  for (int64_t group = 0; group < target.num_groups; ++group) {
    int32_t total = 0;
    for (int64_t i = 0; i < kInputMultiple; ++i) total += quantized[group * kInputMultiple + i];
    sums[group * height + r] = float(total);
  }
  if (target.is_amx())
    place_in_amx_tile(quantized, layout, height, r, target.tile(tile));
  else if (height > 1)
    for (int64_t i = 0; i < target.num_inputs; i += 2) std::memcpy(values + i * height + 2 * r, quantized + i, 4);
}

void place_bytes(const float* x, const Activations& target, int64_t tile, int64_t r) {
  const int64_t first = target.first_row(tile), height = target.height(tile);
  uint8_t* quads = target.tile(tile) + r * 4;
  float* sums = target.group_sums + first * target.num_groups + r;
  QuadFactor* factors = target.factors + first * target.num_groups + r;
  int32_t* largest = grown(row_scratch().largest, target.num_groups);  // of each group
  for (int64_t group = 0; group < target.num_groups; ++group)
    largest[group] = largest_bits(x + group * kInputMultiple, kInputMultiple);
  const int32_t bits = *std::max_element(largest, largest + target.num_groups);
  const bool is_finite = bits < 0x7f800000, is_zero = !is_finite || as_float(bits) < kSmallestMagnitude;
  const float scale = is_zero ? 0.0f : as_float(bits) / (kLargestByte * kLargestFactor);
  target.scales[first + r] = is_finite ? scale : NAN;
  for (int64_t group = 0; group < target.num_groups; ++group, x += kInputMultiple) {
    alignas(32) int8_t bytes[kInputMultiple] = {};
    int32_t factor = 1, total = 0;
    if (!is_zero) {
      const float share = as_float(largest[group]) / as_float(bits);
      factor = std::max(1, int32_t(std::ceil(share * kLargestFactor)));
      store_rounded_quads(bytes, x, 1.0f / (float(factor) * scale));
    }
    for (int64_t i = 0; i < kInputMultiple; ++i) total += bytes[i];
    sums[group * height] = float(total * factor);
    factors[group * height] = quad_factor(factor);
    for (int64_t i = 0; i < kInputMultiple; i += 4, quads += 4 * height) std::memcpy(quads, bytes + i, 4);
  }
}

}  // namespace

int64_t block_rows(const Layout& layout) {
  const int64_t bytes = layout.is_float ? sizeof(float) : sizeof(int16_t);  // of bytes: as many rows, they are the quicker
  const int64_t fitting = kBlockBytes / (layout.padded_inputs * bytes);
  return std::clamp(fitting / kAmxTileRows * kAmxTileRows, kMinBlockRows, kMaxBlockRows);
}

Activations LinearScratch::reserve(int64_t num_rows, const Layout& layout) {
  const int64_t rows = std::min(num_rows, block_rows(layout));
  const int64_t num_groups = layout.has_minimums ? layout.num_segments : 0;
  const bool is_amx = uses_amx(layout, num_rows);
  const Arrangement arrangement = layout.is_float ? Arrangement::kFloats
                                  : is_amx        ? Arrangement::kAmxTiles
                                  : layout.has_byte_activations ? Arrangement::kQuads
                                                                : Arrangement::kPairs;
  const int64_t value_bytes = layout.is_float               ? sizeof(float)
                              : is_amx                      ? amx_value_bytes(layout)
                              : layout.has_byte_activations ? sizeof(int8_t)
                                                            : sizeof(int16_t);
  const int64_t rows_in_memory = round_up(rows, kAmxTileRows);
  const int64_t num_bytes = rows_in_memory * layout.padded_inputs * value_bytes;
  return {arrangement,
          value_bytes,
          reinterpret_cast<uint8_t*>(grown(values_, divide_up(num_bytes, sizeof(Line)))),
          grown(scales_, rows),
          grown(group_sums_, rows_in_memory * num_groups),
          reinterpret_cast<QuadFactor*>(grown(factors_, layout.has_byte_activations ? rows_in_memory * num_groups : 0)),
          layout.padded_inputs,
          num_groups,
          rows};
}

void arrange_piece(const LinearInput& input, const Layout& layout, const Activations& target, int64_t piece) {
  const int64_t num_inputs = layout.num_inputs, amx_first = piece * Activations::kAmxPieceRows;
  const int64_t first = target.is_amx() ? amx_first : target.first_row(piece);
  const int64_t end = target.is_amx() ? std::min(amx_first + Activations::kAmxPieceRows, target.num_rows)
                                      : target.first_row(piece + 1);
  for (int64_t row = first; row < end; ++row) {
    const float* x = input.rows + row * input.stride;
    if (input.norm) {
      float* normed = grown(row_scratch().normed, num_inputs);
      rms_norm_row(x, input.norm, num_inputs, input.norm_eps, normed);
      x = normed;
    }
    const int64_t tile = target.is_amx() ? row / target.amx_height() : piece;
    if (layout.is_float)
      place_floats(x, num_inputs, target, tile, row - target.first_row(tile));
    else if (layout.has_byte_activations)
      place_bytes(x, target, tile, row - target.first_row(tile));
    else
      place_integers(x, num_inputs, layout, target, tile, row - target.first_row(tile));
  }
}
