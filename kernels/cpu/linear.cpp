// The product of quantised weights and any number of rows.
//
// Why results do not depend on the batch or on threads: sums within a segment are exact, and the float sum over
// segments is made in the same order, by the same instructions, on every path.
#include "linear.h"

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "gates.h"
#include "integer_lanes.h"
#include "linear_layout.h"
#include "team.h"

namespace {

constexpr int64_t kChunkInputs = 512;  // expanded at once: 24 outputs of them take 24 KiB, L1
constexpr int64_t kOwnRows = 4;  // so few rows are quantised sooner than handed out
constexpr int64_t kPrefetchBytes = 4096;  // how far ahead of the products weights are fetched

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

void compute_unit(const LinearWeights& weights, const Layout& layout, int64_t unit, const Activations& x,
                  const LinearOutput& output, PanelTotals (&scratch)[2]) {
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
    float* target = output.rows + row * output.stride + feature;
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
    if (weights.gate != kNoGate) apply_gate(weights.gate, result, up, kRowFloats);
    if (output.accumulates)
      for (int64_t i = 0; i < count; ++i) target[i] += result[i];
    else
      std::memcpy(target, result, size_t(count) * sizeof(float));
  }
}

}  // namespace

void linear(Team& team, const LinearWeights& weights, const LinearInput& input, int64_t num_rows,
            const LinearOutput& output, LinearScratch& scratch) {
  const Layout layout(weights);
  const int64_t rows_per_block = block_rows(layout);
  Activations activations = scratch.reserve(num_rows, layout);
  for (int64_t begin = 0; begin < num_rows; begin += rows_per_block) {
    activations.num_rows = std::min(rows_per_block, num_rows - begin);
    const LinearInput block_input = input.from(begin);
    const int64_t num_tiles = activations.num_tiles();
    const auto quantize = [&](Range tiles) {
      for (int64_t tile = tiles.first; tile < tiles.end; ++tile)
        quantize_tile(block_input, activations, tile, weights.num_inputs);
    };
    if (activations.num_rows <= kOwnRows)
      quantize({0, num_tiles});
    else
      team.each(num_tiles, quantize);
    const LinearOutput block{output.rows + begin * output.stride, output.stride, output.accumulates};
    team.each(layout.num_units, [&](Range units) {
      PanelTotals totals[2];  // of a gate and of what it gates, or the first only
      for (int64_t unit = units.first; unit < units.end; ++unit)
        compute_unit(weights, layout, unit, activations, block, totals);
    });
  }
}

extern "C" {

// output += instead of = where accumulates is not 0. Strides in floats, from row to row.
void headrace_linear(Team* team, const LinearWeights* weights, const float* x, int64_t x_stride, int64_t num_rows,
                     float* output, int64_t output_stride, int accumulates) {
  thread_local LinearScratch scratch;
  linear(*team, *weights, {x, x_stride, nullptr, 0.0f}, num_rows, {output, output_stride, accumulates != 0}, scratch);
}

}  // extern "C"
