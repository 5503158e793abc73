// The quantised linear layer: packing of weights, and the product for any number of rows.
//
// Packed weights. Outputs are cut into panels of kPanelWidth, inputs into segments: a group that shares a scale,
// or, with one scale per output, as many as int32 sums can hold. A panel is one contiguous run, in the order in
// which it is multiplied: [panel][segment]{scales, minimums, [pair of inputs][output][2]}. So one row streams through
// the weights once at the speed of memory, and many rows share a chunk of a panel that is expanded to int16 once.
//
// Why results do not depend on the batch or on threads: sums within a segment are exact, and the float sum over
// segments is made in the same order, by the same instructions, on every path.
#include "linear.h"

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "integer_lanes.h"
#include "vector.h"

namespace {

constexpr int kColumns = 3;  // registers of outputs side by side
constexpr int kPanelWidth = kColumns * kIntLanes;
constexpr int kInputMultiple = 32;  // inputs are padded with zeros to it
constexpr int kPairsPerStep = 4;
// 127 * 32767 * 512 is the last multiple of 32 inputs whose sum stays below 2^31.
constexpr int64_t kMaxSegment = 512;
constexpr int64_t kChunkInputs = 512;  // expanded at once: 24 outputs of them take 24 KiB, L1
constexpr int64_t kOwnRows = 4;  // so few rows each thread quantises itself: waiting for the others takes longer
constexpr int64_t kMaxBlockRows = 256;
constexpr int64_t kMinBlockRows = 64;
constexpr int64_t kBlockBytes = 512 << 10;  // of quantised activations, so that they stay in L2
constexpr int64_t kParallelProducts = 1 << 17;  // below this, waking a thread costs more than it saves
constexpr int64_t kPrefetchBytes = 4096;  // how far ahead of the products weights are fetched
constexpr float kLargestActivation = 32767.0f;
constexpr float kSmallestMagnitude = 7.8886091e-31f;  // 2^-100: 32767 / x would overflow soon below it

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

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

// Rows of activations as int16, each with a float scale. Rows are cut into tiles of nearly equal height (5 rows as
// 3 + 2, not 4 + 1). A tile is one run of [pair of inputs][row of the tile][2], in the order in which it is read.
struct Activations {
  int16_t* values;
  float* scales;      // [rows]
  float* group_sums;  // [tile][group][row of the tile]: sums of a segment's integers, where minimums need them
  int16_t* row;       // [padded_inputs], scratch
  int64_t num_inputs;
  int64_t num_groups;  // 0 without minimums
  int64_t num_rows;

  int64_t num_tiles() const { return divide_up(num_rows, kTileRows); }
  int64_t first_row(int64_t tile) const { return num_rows * tile / num_tiles(); }
};

// Memory of a thread that lives from call to call: fresh pages cost more than the product of a small layer.
struct Workspace {
  std::vector<int16_t> values;
  std::vector<int16_t> row;
  std::vector<float> scales;
  std::vector<float> group_sums;

  Activations reserve(int64_t rows, const Layout& layout) {
    grow(values, rows * layout.padded_inputs);
    grow(row, layout.padded_inputs);
    grow(scales, rows);
    grow(group_sums, layout.has_minimums ? rows * layout.num_segments : 0);
    const int64_t num_groups = layout.has_minimums ? layout.num_segments : 0;
    return {values.data(), scales.data(), group_sums.data(), row.data(), layout.padded_inputs, num_groups, rows};
  }

  template <class T>
  static void grow(std::vector<T>& vector, int64_t size) {
    if (vector.size() < size_t(size)) vector.resize(size_t(size));
  }
};

Workspace& workspace() {
  thread_local Workspace of_this_thread;
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

// x is the first row of the tile. `row` is scratch of the calling thread.
void quantize_tile(const float* x, int64_t x_stride, int64_t num_inputs, const Activations& target,
                   int64_t tile, int16_t* row) {
  const int64_t first = target.first_row(tile), height = target.first_row(tile + 1) - first;
  int16_t* values = target.values + first * target.num_inputs;
  float* sums = target.group_sums + first * target.num_groups;
  for (int64_t r = 0; r < height; ++r) {
    int16_t* quantized = height == 1 ? values : row;
    target.scales[first + r] = quantize_row(x + r * x_stride, num_inputs, target.num_inputs, quantized);
    for (int64_t group = 0; group < target.num_groups; ++group) {
      int32_t total = 0;
      for (int64_t i = 0; i < kInputMultiple; ++i) total += quantized[group * kInputMultiple + i];
      sums[group * height + r] = float(total);
    }
    if (height == 1) return;
    for (int64_t i = 0; i < target.num_inputs; i += 2) std::memcpy(values + i * height + 2 * r, row + i, 4);
  }
}

// What the rows of a block sum up over a panel, in units of the scales: [rows, kPanelWidth]. Minimums' part has its own
// sums, so that it may be added segment by segment or ahead of the products and still round alike.
struct PanelTotals {
  alignas(64) float totals[kMaxBlockRows * kPanelWidth];
  alignas(64) float offsets[kMaxBlockRows * kPanelWidth];
};

// Where a tile finds the weights of a panel: as packed, or expanded to int16. `pairs<i>(step, column)` are those
// of pair i of the kPairsPerStep pairs that begin at `step`.

struct PackedWeights {
  const uint8_t* segments;
  const Layout& layout;

  const uint8_t* data(int64_t index) const { return header(index) + layout.header_bytes; }
  Floats scale(int64_t index, int column) const {
    if (layout.has_channel_scales) return broadcast_float(1.0f);
    return load_halves(reinterpret_cast<const uint16_t*>(header(index)) + column * kIntLanes);
  }
  Floats minimum(int64_t index, int column) const {
    return load_halves(reinterpret_cast<const uint16_t*>(header(index)) + kPanelWidth + column * kIntLanes);
  }
  const uint8_t* header(int64_t index) const { return segments + index * layout.segment_bytes; }
};

// Which packed weights to fetch while others are multiplied. A single tile reads its own a little ahead; several
// share out the next chunk, which follows in memory. After the last panel that is nothing of ours: prefetching does
// not care.
struct Ahead {
  const uint8_t* address;
  int64_t step_bytes;  // for each step of a tile
  int64_t tile_bytes;

  Ahead(const PackedWeights& packed, int64_t first, int64_t end, int64_t num_tiles) {
    const int64_t chunk_bytes = packed.layout.segment_bytes * (end - first);
    const int64_t num_steps = (end - first) * packed.layout.segment / (2 * kPairsPerStep);
    address = num_tiles == 1 ? packed.header(first) + kPrefetchBytes : packed.header(end);
    step_bytes = divide_up(chunk_bytes, num_steps * num_tiles);
    tile_bytes = chunk_bytes / num_tiles;
  }
};

struct ByteWeights : PackedWeights {
  static constexpr bool kIsStreamed = true;
  static constexpr int kLinesAhead = kPairsPerStep * 2 * kPanelWidth / 64;
  static constexpr int64_t kDirectRows = kIntLanes == 16 ? 64 : 24;
  static constexpr int kStepBytes = kPairsPerStep * 2 * kPanelWidth;
  template <int kPair>
  static Ints pairs(const uint8_t* step, int column) {
    return widen_bytes(step + 2 * (kPair * kPanelWidth + column * kIntLanes));
  }
};

// A 16-bit word holds one input of the four pairs of a step, the first in the lowest bits.
struct NibbleWeights : PackedWeights {
  static constexpr bool kIsStreamed = true;
  static constexpr int kLinesAhead = kPairsPerStep * kPanelWidth / 64 + 1;
  static constexpr int64_t kDirectRows = 8;
  static constexpr int kStepBytes = kPairsPerStep * kPanelWidth;
  template <int kPair>
  static Ints pairs(const uint8_t* step, int column) {
    return nibbles<kPair>(load_ints(step + column * sizeof(Ints)));
  }
};

struct ExpandedWeights {
  static constexpr bool kIsStreamed = false;
  static constexpr int kLinesAhead = 2;
  static constexpr int kStepBytes = kPairsPerStep * 2 * kPanelWidth * int(sizeof(int16_t));

  explicit ExpandedWeights(const Layout& layout) : layout(layout) {}

  template <class Packed>
  void expand(const Packed& packed, int64_t first_segment, int64_t end_segment) {
    first = first_segment;
    for (int64_t index = first; index < end_segment; ++index) {
      const uint8_t* step = packed.data(index);
      int16_t* target = values + (index - first) * layout.segment * kPanelWidth;
      for (int64_t pair = 0; pair < layout.num_pairs(index); pair += kPairsPerStep) {
        for (int column = 0; column < kColumns; ++column) {
          int16_t* to = target + column * 2 * kIntLanes;
          store_ints(to, Packed::template pairs<0>(step, column));
          store_ints(to + 2 * kPanelWidth, Packed::template pairs<1>(step, column));
          store_ints(to + 4 * kPanelWidth, Packed::template pairs<2>(step, column));
          store_ints(to + 6 * kPanelWidth, Packed::template pairs<3>(step, column));
        }
        step += Packed::kStepBytes;
        target += kPairsPerStep * 2 * kPanelWidth;
      }
      for (int column = 0; column < kColumns; ++column) {
        const int64_t at = (index - first) * kPanelWidth + column * kIntLanes;
        store_floats(scales + at, packed.scale(index, column));
        if (layout.has_minimums) store_floats(minimums + at, packed.minimum(index, column));
      }
    }
  }

  const uint8_t* data(int64_t index) const {
    return reinterpret_cast<const uint8_t*>(values + (index - first) * layout.segment * kPanelWidth);
  }
  Floats scale(int64_t index, int column) const {
    return load_floats(scales + (index - first) * kPanelWidth + column * kIntLanes);
  }
  Floats minimum(int64_t index, int column) const {
    return load_floats(minimums + (index - first) * kPanelWidth + column * kIntLanes);
  }
  template <int kPair>
  static Ints pairs(const uint8_t* step, int column) {
    return load_ints(step + 4 * (kPair * kPanelWidth + column * kIntLanes));
  }

  const Layout& layout;
  int64_t first = 0;  // the segment that the chunk begins with
  alignas(64) int16_t values[kChunkInputs * kPanelWidth];
  alignas(64) float scales[kChunkInputs / kInputMultiple * kPanelWidth];
  alignas(64) float minimums[kChunkInputs / kInputMultiple * kPanelWidth];
};

#define HEADRACE_INLINE inline __attribute__((always_inline))
#define HEADRACE_INLINE_BODY __attribute__((always_inline))

// body(0), ... body(kCount - 1) with constant arguments. Not a loop with a pragma: compilers unroll those too late to
// keep arrays of sums in registers.
template <int kCount, class Body>
HEADRACE_INLINE void unrolled(const Body& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>{});
  }
}

// Where a product is added to its sum in one instruction, the latency wants more sums than a few rows have.
template <int kRows>
constexpr int kChains = kDotAccumulates && kRows * kColumns < 8 ? 2 : 1;

template <int kRows>
struct Sums {
  Ints chains[kChains<kRows>][kRows][kColumns];
};

// The products of kPairsPerStep pairs of inputs; the first step of a segment begins the sums.
template <class Weights, bool kIsFirst, int kRows>
HEADRACE_INLINE void multiply_step(const uint8_t* step, const int16_t* x, const uint8_t* ahead, Sums<kRows>& sums) {
  unrolled<Weights::kLinesAhead>([&](auto line) HEADRACE_INLINE_BODY { __builtin_prefetch(ahead + 64 * line); });
  unrolled<kPairsPerStep>([&](auto pair) HEADRACE_INLINE_BODY {
    Ints weights[kColumns];
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      weights[column] = Weights::template pairs<pair>(step, column);
    });
    unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
      const Ints activations = broadcast_pair(x + 2 * (pair * kRows + row));
      unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
        Ints& sum = sums.chains[pair % kChains<kRows>][row][column];
        if constexpr (kIsFirst && pair < kChains<kRows>)
          sum = dot(weights[column], activations);
        else
          sum = add_dot(sum, weights[column], activations);
        keep_in_register(sum);
      });
    });
  });
}

// What minimums add, which is the same for all inputs of a segment: minimum times the sum of its activations.
template <int kRows, class Weights>
HEADRACE_INLINE void add_minimums(const Weights& weights, int64_t first, int64_t end, const float* group_sums,
                                  float* offsets) {
  unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
    float* target = offsets + column * kIntLanes;
    Floats sums[kRows];
    unrolled<kRows>([&](auto r) HEADRACE_INLINE_BODY { sums[r] = load_floats(target + r * kPanelWidth); });
    for (int64_t index = first; index < end; ++index) {
      const Floats minimum = weights.minimum(index, column);
      unrolled<kRows>([&](auto r) HEADRACE_INLINE_BODY {
        sums[r] = multiply_add(broadcast_float(group_sums[(index - first) * kRows + r]), minimum, sums[r]);
      });
    }
    unrolled<kRows>([&](auto r) HEADRACE_INLINE_BODY { store_floats(target + r * kPanelWidth, sums[r]); });
  });
}

// totals[row][output] += the products of segments first .. end - 1, for the tile of kRows rows from `row` on.
template <int kRows, class Weights>
void multiply_tile(const Weights& weights, int64_t first, int64_t end, const Activations& x, int64_t row,
                   Ahead ahead, float* totals, float* offsets) {
  const int16_t* values = x.values + row * x.num_inputs + first * weights.layout.segment * kRows;
  const float* group_sums = x.group_sums + row * x.num_groups;
  const bool has_minimums = weights.layout.has_minimums;
  if (has_minimums && !Weights::kIsStreamed)
    add_minimums<kRows>(weights, first, end, group_sums + first * kRows, offsets);
  for (int64_t index = first; index < end; ++index) {
    if (has_minimums && Weights::kIsStreamed)
      add_minimums<kRows>(weights, index, index + 1, group_sums + index * kRows, offsets);
    Sums<kRows> sums;
    const uint8_t* step = weights.data(index);
    multiply_step<Weights, true>(step, values, ahead.address, sums);
    ahead.address += ahead.step_bytes;
    for (int64_t i = weights.layout.num_pairs(index) / kPairsPerStep - 1; i > 0; --i) {
      step += Weights::kStepBytes;
      values += 2 * kPairsPerStep * kRows;
      multiply_step<Weights, false>(step, values, ahead.address, sums);
      ahead.address += ahead.step_bytes;
    }
    values += 2 * kPairsPerStep * kRows;
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      const Floats scale = weights.scale(index, column);
      unrolled<kRows>([&](auto r) HEADRACE_INLINE_BODY {
        Ints sum = sums.chains[0][r][column];
        if constexpr (kChains<kRows> == 2) sum = add(sum, sums.chains[1][r][column]);
        float* target = totals + r * kPanelWidth + column * kIntLanes;
        store_floats(target, multiply_add(to_floats(sum), scale, load_floats(target)));
      });
    });
  }
}

template <class Weights>
void multiply_rows(const Weights& weights, int64_t first, int64_t end, const Activations& x, Ahead ahead,
                   PanelTotals& panel) {
  const int64_t num_tiles = x.num_tiles();
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = x.first_row(tile), height = x.first_row(tile + 1) - row;
    float *totals = panel.totals + row * kPanelWidth, *offsets = panel.offsets + row * kPanelWidth;
    unrolled<kTileRows>([&](auto below) HEADRACE_INLINE_BODY {
      if (height == below + 1) multiply_tile<below + 1>(weights, first, end, x, row, ahead, totals, offsets);
    });
    ahead.address += ahead.tile_bytes;
  }
}

template <class Packed>
void multiply_panel(const Packed& packed, const Activations& x, PanelTotals& panel) {
  const Layout& layout = packed.layout;
  const int64_t num_totals = x.num_rows * kPanelWidth;
  std::fill_n(panel.totals, num_totals, 0.0f);
  if (layout.has_minimums) std::fill_n(panel.offsets, num_totals, 0.0f);
  const bool is_direct = x.num_rows <= Packed::kDirectRows;
  ExpandedWeights expanded(layout);
  const int64_t num_chunks = divide_up(layout.num_segments * layout.segment, kChunkInputs);
  const int64_t chunk_segments = divide_up(layout.num_segments, num_chunks);
  for (int64_t first = 0; first < layout.num_segments; first += chunk_segments) {
    const int64_t end = std::min(first + chunk_segments, layout.num_segments);
    const Ahead ahead(packed, first, end, x.num_tiles());
    if (is_direct) {
      multiply_rows(packed, first, end, x, ahead, panel);
    } else {
      expanded.expand(packed, first, end);
      multiply_rows(expanded, first, end, x, ahead, panel);
    }
  }
  if (layout.has_minimums)
    for (int64_t i = 0; i < num_totals; ++i) panel.totals[i] += panel.offsets[i];
}

void multiply_panel(const LinearWeights& weights, const Layout& layout, int64_t index, const Activations& x,
                    PanelTotals& panel) {
  const PackedWeights packed{weights.packed + index * layout.panel_bytes + layout.channel_bytes, layout};
  if (layout.has_minimums)
    multiply_panel(NibbleWeights{packed}, x, panel);
  else
    multiply_panel(ByteWeights{packed}, x, panel);
}

// What turns the totals of a panel into results: `(total * scale) * row scale + bias`, padded to the panel's width.
struct PanelScale {
  float scales[kPanelWidth];
  float bias[kPanelWidth];

  PanelScale(const LinearWeights& weights, const Layout& layout, int64_t panel, int64_t first_output, int64_t count) {
    if (layout.has_channel_scales)
      std::memcpy(scales, weights.packed + panel * layout.panel_bytes, sizeof(scales));
    else
      std::fill_n(scales, kPanelWidth, 1.0f);
    std::fill_n(bias, kPanelWidth, 0.0f);
    if (weights.bias) std::memcpy(bias, weights.bias + first_output, size_t(count) * sizeof(float));
  }

  Floats apply(const float* totals, float row_scale, int column) const {
    const Floats total = multiply(load_floats(totals + column * kIntLanes), load_floats(scales + column * kIntLanes));
    return multiply_add(total, broadcast_float(row_scale), load_floats(bias + column * kIntLanes));
  }
};

constexpr int kRowFloats = (kPanelWidth + kLanes - 1) / kLanes * kLanes;

void apply_gate(Gate gate, float* gates, const float* up) {
  constexpr float kRoot = 0.79788456f;  // sqrt(2 / pi)
  for (int64_t i = 0; i < kRowFloats; i += kLanes) {
    const Vector g = load(gates + i);
    const Vector factor = gate == kSilu ? 1.0f / (1.0f + exponential(smaller(-g, broadcast(88.0f))))
                                        : 0.5f * (1.0f + hyperbolic_tangent(kRoot * (g + 0.044715f * g * g * g)));
    store(gates + i, g * factor * load(up + i));
  }
}

struct Output {
  float* values;
  int64_t stride;
  bool accumulates;
};

void compute_unit(const LinearWeights& weights, const Layout& layout, int64_t unit, const Activations& x,
                  const Output& output, PanelTotals (&scratch)[2]) {
  const int64_t feature = unit * kPanelWidth;
  const int64_t count = std::min<int64_t>(kPanelWidth, layout.num_features - feature);
  for (int64_t part = 0; part < layout.panels_per_unit; ++part)
    multiply_panel(weights, layout, unit * layout.panels_per_unit + part, x, scratch[part]);
  const int64_t panel = unit * layout.panels_per_unit;
  const PanelScale scale(weights, layout, panel, feature, count);
  const PanelScale up_scale(weights, layout, panel + layout.panels_per_unit - 1,
                            feature + (weights.gate == kNoGate ? 0 : layout.num_features), count);
  float result[kRowFloats] = {}, up[kRowFloats] = {};
  for (int64_t row = 0; row < x.num_rows; ++row) {
    float* target = output.values + row * output.stride + feature;
    const int64_t at = row * kPanelWidth;
    const float row_scale = x.scales[row];
    if (weights.gate == kNoGate && count == kPanelWidth) {
      for (int column = 0; column < kColumns; ++column) {
        Floats value = scale.apply(scratch[0].totals + at, row_scale, column);
        if (output.accumulates) value = add_floats(value, load_floats(target + column * kIntLanes));
        store_floats(target + column * kIntLanes, value);
      }
      continue;
    }
    for (int column = 0; column < kColumns; ++column) {
      store_floats(result + column * kIntLanes, scale.apply(scratch[0].totals + at, row_scale, column));
      if (weights.gate != kNoGate)
        store_floats(up + column * kIntLanes, up_scale.apply(scratch[1].totals + at, row_scale, column));
    }
    if (weights.gate != kNoGate) apply_gate(weights.gate, result, up);
    if (output.accumulates)
      for (int64_t i = 0; i < count; ++i) target[i] += result[i];
    else
      std::memcpy(target, result, size_t(count) * sizeof(float));
  }
}

int64_t block_rows(const Layout& layout) {
  const int64_t fitting = kBlockBytes / (layout.padded_inputs * int64_t(sizeof(int16_t)));
  return std::clamp(fitting / kTileRows * kTileRows, kMinBlockRows, kMaxBlockRows);
}

void compute(const LinearWeights& weights, const float* x, int64_t x_stride, int64_t num_rows, const Output& output) {
  const Layout layout(weights);
  const bool shares_activations = num_rows > kOwnRows;
  const int64_t rows_per_block = block_rows(layout);
  const bool is_parallel = num_rows * weights.num_inputs * weights.num_outputs >= kParallelProducts;
  Activations shared{};
  if (shares_activations) shared = workspace().reserve(std::min(num_rows, rows_per_block), layout);
#pragma omp parallel num_threads(weights.num_threads) if (is_parallel)
  {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    Activations own = workspace().reserve(shares_activations ? 0 : num_rows, layout);
    Activations activations = shares_activations ? shared : own;
    PanelTotals scratch[2];  // of a gate and of what it gates, or the first only
    for (int64_t begin = 0; begin < num_rows; begin += rows_per_block) {
      activations.num_rows = std::min(rows_per_block, num_rows - begin);
      const int64_t num_tiles = activations.num_tiles();
      const int64_t first_tile = shares_activations ? num_tiles * thread / num_threads : 0;
      const int64_t end_tile = shares_activations ? num_tiles * (thread + 1) / num_threads : num_tiles;
      for (int64_t tile = first_tile; tile < end_tile; ++tile)
        quantize_tile(x + (begin + activations.first_row(tile)) * x_stride, x_stride, weights.num_inputs, activations,
                      tile, own.row);
      if (shares_activations) {
#pragma omp barrier
      }
      const Output block{output.values + begin * output.stride, output.stride, output.accumulates};
      for (int64_t unit = layout.num_units * thread / num_threads;
           unit < layout.num_units * (thread + 1) / num_threads; ++unit)
        compute_unit(weights, layout, unit, activations, block, scratch);
      if (begin + rows_per_block < num_rows) {  // the next block's activations go where this one's are read
#pragma omp barrier
      }
    }
  }
}

// The row of the weight that lane `lane` of a panel computes, or -1 for padding.
int64_t weight_row(const Layout& layout, int64_t panel, int64_t lane) {
  const int64_t feature = panel / layout.panels_per_unit * kPanelWidth + lane;
  if (feature >= layout.num_features) return -1;
  return feature + panel % layout.panels_per_unit * layout.num_features;
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
        const int64_t step = i / (2 * kPairsPerStep), pair = i / 2 % kPairsPerStep;
        uint8_t* word = data + step * NibbleWeights::kStepBytes + 4 * lane + 2 * (i % 2);
        word[pair / 2] |= uint8_t((source[i] & 15) << (4 * (pair % 2)));  // little endian
      }
    } else {
      for (int64_t i = 0; i < count; ++i) data[i / 2 * 2 * kPanelWidth + 2 * lane + i % 2] = source[i];
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
void headrace_linear_pack(const LinearWeights* weights, const uint8_t* values, const uint16_t* scales,
                          const uint16_t* minimums, const float* channel_scales, uint8_t* target) {
  const Layout layout(*weights);
  const int64_t num_panels = layout.num_units * layout.panels_per_unit;
#pragma omp parallel for num_threads(weights->num_threads)
  for (int64_t panel = 0; panel < num_panels; ++panel) {
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
  }
}

// output += instead of = where accumulates is not 0. Strides in floats, from row to row.
void headrace_linear(const LinearWeights* weights, const float* x, int64_t x_stride, int64_t num_rows, float* output,
                     int64_t output_stride, int accumulates) {
  compute(*weights, x, x_stride, num_rows, {output, output_stride, accumulates != 0});
}

}  // extern "C"
