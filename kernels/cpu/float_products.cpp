// Panels of float weights.
//
// Why results do not depend on the batch or on threads: within a segment products are added in the order of the inputs,
// each by one multiply-add, then the segment to the others; on every path.
#include "integer_lanes.h"
#include "panel_products.h"
#include "unrolled.h"

namespace {

constexpr int kInputsPerStep = 4;

// Where a tile finds the weights of a segment. `input<i>(step, column)` are those of input i of the kInputsPerStep
// that begin at `step`.

struct Float32Weights {
  static constexpr int kStepBytes = kInputsPerStep * kPanelWidth * int(sizeof(float));
  template <int kInput>
  static Floats input(const uint8_t* step, int column) {
    return load_floats(reinterpret_cast<const float*>(step) + kInput * kPanelWidth + column * kIntLanes);
  }
};

struct Bfloat16Weights {
  static constexpr int kStepBytes = kInputsPerStep * kPanelWidth * int(sizeof(uint16_t));
  template <int kInput>
  static Floats input(const uint8_t* step, int column) {
    const Ints pairs = load_ints(step + 4 * (kInput / 2 * kPanelWidth + column * kIntLanes));
    return kInput % 2 == 0 ? low_bfloat16s(pairs) : high_bfloat16s(pairs);
  }
};

struct Float16Weights {
  static constexpr int kStepBytes = kInputsPerStep * kPanelWidth * int(sizeof(uint16_t));
  template <int kInput>
  static Floats input(const uint8_t* step, int column) {
    return load_halves(reinterpret_cast<const uint16_t*>(step) + kInput * kPanelWidth + column * kIntLanes);
  }
};

// With more rows it pays to widen the numbers of 16 bits once for all.
constexpr int64_t kHalfDirectRows = kIntLanes == 16 ? 64 : 4;

// totals[row][output] += the products of `length` inputs, for the tile of kRows rows that `x` begins with.
template <int kRows, class Weights>
void multiply_tile(const uint8_t* weights, int64_t length, const float* x, Ahead ahead, float* totals) {
  Floats sums[kRows][kColumns];
  unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY { sums[row][column] = broadcast_float(0.0f); });
  });
  for (int64_t i = 0; i < length; i += kInputsPerStep) {
    ahead.fetch_step();
    unrolled<kInputsPerStep>([&](auto input) HEADRACE_INLINE_BODY {
      Floats columns[kColumns];
      unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
        columns[column] = Weights::template input<input>(weights, column);
      });
      unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
        const Floats activation = broadcast_float(x[input * kRows + row]);
        unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
          sums[row][column] = multiply_add(activation, columns[column], sums[row][column]);
        });
      });
    });
    weights += Weights::kStepBytes;
    x += kInputsPerStep * kRows;
  }
  unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      float* target = totals + row * kPanelWidth + column * kIntLanes;
      store_floats(target, add_floats(sums[row][column], load_floats(target)));
    });
  });
}

template <class Weights>
void multiply_rows(const uint8_t* weights, int64_t first_input, int64_t length, const Activations& x, Ahead ahead,
                   PanelTotals& panel) {
  const int64_t num_tiles = x.num_tiles();
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = x.first_row(tile), height = x.height(tile);
    const float* values = reinterpret_cast<const float*>(x.tile(tile)) + first_input * height;
    float* totals = panel.totals + row * kPanelWidth;
    unrolled<kTileRows>([&](auto below) HEADRACE_INLINE_BODY {
      if (height == below + 1) multiply_tile<below + 1, Weights>(weights, length, values, ahead, totals);
    });
    ahead.address += ahead.tile_bytes;
  }
}

// A segment of a panel as float32.
struct Expanded {
  alignas(64) float values[kMaxFloatSegment * kPanelWidth];

  template <class Weights>
  void expand(const uint8_t* step, int64_t length) {
    for (float* target = values; target < values + length * kPanelWidth; target += kInputsPerStep * kPanelWidth) {
      unrolled<kInputsPerStep>([&](auto input) HEADRACE_INLINE_BODY {
        for (int column = 0; column < kColumns; ++column)
          store_floats(target + input * kPanelWidth + column * kIntLanes,
                       Weights::template input<input>(step, column));
      });
      step += Weights::kStepBytes;
    }
  }
};

template <class Weights>
void multiply_panel(const uint8_t* segment, const Layout& layout, const Activations& x, PanelTotals& sums) {
  constexpr bool kIsHalf = !std::is_same_v<Weights, Float32Weights>;
  std::fill_n(sums.totals, x.num_rows * kPanelWidth, 0.0f);
  Expanded expanded;
  for (int64_t index = 0; index < layout.num_segments; ++index, segment += layout.segment_bytes) {
    const int64_t length = layout.length(index), first_input = index * layout.segment;
    const Ahead ahead(segment, layout.data_bytes(length), length / kInputsPerStep, x.num_tiles());
    if (kIsHalf && x.num_rows > kHalfDirectRows) {
      expanded.expand<Weights>(segment, length);
      const uint8_t* values = reinterpret_cast<const uint8_t*>(expanded.values);
      multiply_rows<Float32Weights>(values, first_input, length, x, ahead, sums);
    } else {
      multiply_rows<Weights>(segment, first_input, length, x, ahead, sums);
    }
  }
}

}  // namespace

void multiply_floats(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                     PanelTotals& sums) {
  const uint8_t* segments = weights.packed + panel * layout.panel_bytes;
  if (layout.format == WeightFormat::kBfloat16)
    multiply_panel<Bfloat16Weights>(segments, layout, x, sums);
  else if (layout.format == WeightFormat::kFloat16)
    multiply_panel<Float16Weights>(segments, layout, x, sums);
  else
    multiply_panel<Float32Weights>(segments, layout, x, sums);
}
