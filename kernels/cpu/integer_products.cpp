// Panels of quantised weights.
//
// Why results do not depend on the batch or on threads: sums within a segment are exact, and the float sum over
// segments is made in the same order, by the same instructions, on every path.
#include "integer_lanes.h"
#include "panel_products.h"
#include "unrolled.h"

namespace {

constexpr int64_t kChunkInputs = 512;  // expanded at once: 24 outputs of them take 24 KiB at most, L1

// How activations and weights are multiplied. A step is of kPairsPerStep pairs of inputs; a part of it is of one register
// of weights for each column, and of four bytes of each row of activations.

struct Pairs {
  static constexpr int kParts = kPairsPerStep;
  static constexpr int kValueBytes = sizeof(int16_t);
  static constexpr bool kHasFactors = false;
  static Ints first(Ints weights, Ints x) { return dot(weights, x); }
  static Ints next(Ints sum, Ints weights, Ints x) { return add_dot(sum, weights, x); }
};

struct Quads {
  static constexpr int kParts = kPairsPerStep / 2;
  static constexpr int kValueBytes = sizeof(int8_t);
  static constexpr bool kHasFactors = true;
  static_assert(kInputMultiple / 4 <= 8, "a sum of more quads could exceed 16 bits");
  static Ints first(Ints weights, Ints x) { return dot_quads(weights, x); }
  static Ints next(Ints sum, Ints weights, Ints x) { return add_dot_quads(sum, weights, x); }
};

// Where a tile finds the weights of a panel: as packed, or expanded to int16. They stand at a segment, and step to the
// next. `part<i>(step, column)` are those of part i of the step that begins there.

struct PackedWeights {
  static constexpr bool kIsStreamed = true;
  static constexpr int kFewestRows = 1;

  PackedWeights(const uint8_t* segments, const Layout& layout, int64_t index)
      : header(segments + index * layout.segment_bytes),
        header_bytes(layout.header_bytes),
        segment_bytes(layout.segment_bytes) {}

  void next_segment() { header += segment_bytes; }
  const uint8_t* data() const { return header + header_bytes; }
  Floats scale(int column) const {
    if (header_bytes == 0) return broadcast_float(1.0f);  // one scale per output
    return load_halves(reinterpret_cast<const uint16_t*>(header) + column * kIntLanes);
  }
  Floats minimum(int column) const {
    return load_halves(reinterpret_cast<const uint16_t*>(header) + kPanelWidth + column * kIntLanes);
  }

  const uint8_t* header;
  int64_t header_bytes;
  int64_t segment_bytes;
};

struct ByteWeights : PackedWeights {
  using Product = Pairs;
  static constexpr bool kAddsMinimums = false;
  static constexpr int64_t kDirectRows = kTileRows == 8 ? 48 : 12;
  static constexpr int kStepBytes = kPairsPerStep * 2 * kPanelWidth;
  static constexpr int kLinesAhead = kStepBytes / 64;
  using PackedWeights::PackedWeights;

  template <int kPair>
  static Ints part(const uint8_t* step, int column) {
    if constexpr (kBytesAreQuads) {
      const Ints quads = load_ints(step + 4 * (kPair / 2 * kPanelWidth + column * kIntLanes));
      return kPair % 2 == 0 ? even_bytes(quads) : odd_bytes(quads);
    }
    return widen_bytes(step + 2 * (kPair * kPanelWidth + column * kIntLanes));
  }
};

// A 16-bit word holds one input of the four pairs of a step, the first in the lowest bits.
struct NibbleWeights : PackedWeights {
  using Product = Pairs;
  static constexpr bool kAddsMinimums = true;
  static constexpr int64_t kDirectRows = 2 * kTileRows;
  static constexpr int kStepBytes = kPairsPerStep * kPanelWidth;
  static constexpr int kLinesAhead = kStepBytes / 64 + 1;
  using PackedWeights::PackedWeights;

  template <int kPair>
  static Ints part(const uint8_t* step, int column) {
    return nibbles<kPair>(load_ints(step + column * sizeof(Ints)));
  }
};

// The same bytes: the low halves of a word's four bytes are a quad, and the high ones.
struct NibbleQuads : NibbleWeights {
  using Product = Quads;
  static constexpr int64_t kDirectRows = kTileRows;
  using NibbleWeights::NibbleWeights;

  template <int kQuad>
  static Ints part(const uint8_t* step, int column) {
    const Ints packed = load_ints(step + column * sizeof(Ints));
    return kQuad == 0 ? low_nibbles(packed) : high_nibbles(packed);
  }
};

// A chunk of a panel, expanded.
struct Chunk {
  alignas(64) uint8_t values[kChunkInputs * kPanelWidth * sizeof(int16_t)];
  alignas(64) float scales[kChunkInputs / kSmallestSegment * kPanelWidth];
  alignas(64) float minimums[kChunkInputs / kInputMultiple * kPanelWidth];

  template <class Packed>
  void expand(Packed packed, const Layout& layout, int64_t first, int64_t end) {
    constexpr int kParts = Packed::Product::kParts;
    uint8_t* target = values;
    for (int64_t index = first; index < end; ++index) {
      const uint8_t* step = packed.data();
      for (int64_t pair = 0; pair < layout.length(index) / 2; pair += kPairsPerStep) {
        unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
          unrolled<kParts>([&](auto i) HEADRACE_INLINE_BODY {
            store_ints(target + 4 * (i * kPanelWidth + column * kIntLanes), Packed::template part<i>(step, column));
          });
        });
        step += Packed::kStepBytes;
        target += kParts * 4 * kPanelWidth;
      }
      for (int column = 0; column < kColumns; ++column) {
        const int64_t at = (index - first) * kPanelWidth + column * kIntLanes;
        store_floats(scales + at, packed.scale(column));
        if (Packed::kAddsMinimums) store_floats(minimums + at, packed.minimum(column));
      }
      packed.next_segment();
    }
  }
};

template <class OfProduct>
struct ExpandedWeights {
  using Product = OfProduct;
  static constexpr bool kIsStreamed = false;
  static constexpr bool kAddsMinimums = false;  // segment by segment; they are added ahead
  static constexpr int kFewestRows = kTileRows / 2;  // of a tile, with more rows than kDirectRows
  static constexpr int kLinesAhead = 2;
  static constexpr int kStepBytes = Product::kParts * 4 * kPanelWidth;

  ExpandedWeights(const Chunk& chunk, const Layout& layout)
      : values(chunk.values),
        segment_bytes(layout.segment * kPanelWidth * Product::kValueBytes),
        scales(chunk.scales),
        minimums(chunk.minimums) {}

  void next_segment() {
    values += segment_bytes;
    scales += kPanelWidth;
    minimums += kPanelWidth;
  }
  const uint8_t* data() const { return values; }
  Floats scale(int column) const { return load_floats(scales + column * kIntLanes); }
  Floats minimum(int column) const { return load_floats(minimums + column * kIntLanes); }
  template <int kPart>
  static Ints part(const uint8_t* step, int column) {
    return load_ints(step + 4 * (kPart * kPanelWidth + column * kIntLanes));
  }

  const uint8_t* values;
  int64_t segment_bytes;
  const float* scales;
  const float* minimums;
};

// Where a product is added to its sum in one instruction, the latency wants more sums than a few rows have.
template <int kRows>
constexpr int kChains = kDotAccumulates && kRows * kColumns < 8 ? 2 : 1;

template <int kRows>
struct Sums {
  Ints chains[kChains<kRows>][kRows][kColumns];

  Ints total(int row, int column) const {
    if constexpr (kChains<kRows> == 2) return add(chains[0][row][column], chains[1][row][column]);
    return chains[0][row][column];
  }
};

// The products of a step; the first one of a segment begins the sums.
template <class Weights, bool kIsFirst, int kRows>
HEADRACE_INLINE void multiply_step(const uint8_t* step, const uint8_t* x, const uint8_t* ahead, Sums<kRows>& sums) {
  using Product = typename Weights::Product;
  unrolled<Weights::kLinesAhead>([&](auto line) HEADRACE_INLINE_BODY { __builtin_prefetch(ahead + 64 * line); });
  unrolled<Product::kParts>([&](auto part) HEADRACE_INLINE_BODY {
    Ints weights[kColumns];
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      weights[column] = Weights::template part<part>(step, column);
    });
    unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
      const Ints activations = broadcast_group(x + 4 * (part * kRows + row));
      unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
        Ints& sum = sums.chains[part % kChains<kRows>][row][column];
        if constexpr (kIsFirst && part < kChains<kRows>)
          sum = Product::first(weights[column], activations);
        else
          sum = Product::next(sum, weights[column], activations);
        keep_in_register(sum);
      });
    });
  });
}

// Floats of a tile, [row][kPanelWidth] in memory: held in registers throughout where there are enough of them.
template <int kRows, bool kIsHeld>
struct TileFloats {
  float* memory;
  Floats held[kIsHeld ? kRows : 1][kColumns];

  HEADRACE_INLINE explicit TileFloats(float* memory) : memory(memory) {
    if constexpr (kIsHeld)
      for_each([&](auto row, auto column) HEADRACE_INLINE_BODY { held[row][column] = load_floats(at(row, column)); });
  }
  HEADRACE_INLINE void add_product(int row, int column, Floats a, Floats b) {
    if constexpr (kIsHeld)
      held[row][column] = multiply_add(a, b, held[row][column]);
    else
      store_floats(at(row, column), multiply_add(a, b, load_floats(at(row, column))));
  }
  HEADRACE_INLINE void leave() {
    if constexpr (kIsHeld)
      for_each([&](auto row, auto column) HEADRACE_INLINE_BODY { store_floats(at(row, column), held[row][column]); });
  }

 private:
  float* at(int row, int column) const { return memory + row * kPanelWidth + column * kIntLanes; }
  template <class Body>
  HEADRACE_INLINE void for_each(const Body& body) {
    unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
      unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY { body(row, column); });
    });
  }
};

// What minimums add, which is the same for all inputs of a segment: minimum times the sum of its activations.
template <int kRows, bool kIsHeld, class Weights>
HEADRACE_INLINE void add_minimums(const Weights& weights, const float* group_sums, TileFloats<kRows, kIsHeld>& offsets) {
  Floats minimums[kColumns];
  unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY { minimums[column] = weights.minimum(column); });
  unrolled<kRows>([&](auto row) HEADRACE_INLINE_BODY {
    const Floats group_sum = broadcast_float(group_sums[row]);
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      offsets.add_product(row, column, group_sum, minimums[column]);
    });
  });
}

// totals[row][output] += the products of segments first .. end - 1, for the tile of kRows rows from `row` on.
template <int kRows, class Weights>
void multiply_tile(Weights weights, const Layout& layout, int64_t first, int64_t end, const Activations& x,
                   int64_t row, Ahead ahead, PanelTotals& panel) {
  constexpr bool kIsHeld = kRows <= kIntLanes / 8;
  using Product = typename Weights::Product;
  constexpr int kStepBytes = Product::kParts * 4 * kRows;  // of activations
  const uint8_t* values = x.values + (row * x.num_inputs + first * layout.segment * kRows) * Product::kValueBytes;
  const float* group_sums = x.group_sums + row * x.num_groups + first * kRows;
  const QuadFactor* factors = x.factors + row * x.num_groups + first * kRows;
  if constexpr (!Weights::kIsStreamed)
    if (layout.has_minimums) {
      TileFloats<kRows, true> offsets(panel.offsets + row * kPanelWidth);
      Weights each = weights;
      for (int64_t index = first; index < end; ++index) {
        add_minimums<kRows>(each, group_sums, offsets);
        group_sums += kRows;
        each.next_segment();
      }
      offsets.leave();
    }
  TileFloats<kRows, kIsHeld> totals(panel.totals + row * kPanelWidth), offsets(panel.offsets + row * kPanelWidth);
  for (int64_t index = first; index < end; ++index) {
    if constexpr (Weights::kAddsMinimums) {
      add_minimums<kRows>(weights, group_sums, offsets);
      group_sums += kRows;
    }
    asm volatile("" ::: "memory");
    Sums<kRows> sums;
    const uint8_t* step = weights.data();
    multiply_step<Weights, true>(step, values, ahead.address, sums);
    ahead.address += ahead.step_bytes;
    values += kStepBytes;
    for (int64_t left = layout.length(index) / 2 - kPairsPerStep; left > 0; left -= kPairsPerStep) {
      step += Weights::kStepBytes;
      multiply_step<Weights, false>(step, values, ahead.address, sums);
      ahead.address += ahead.step_bytes;
      values += kStepBytes;
    }
    unrolled<kColumns>([&](auto column) HEADRACE_INLINE_BODY {
      const Floats scale = weights.scale(column);
      unrolled<kRows>([&](auto r) HEADRACE_INLINE_BODY {
        if constexpr (Product::kHasFactors)
          totals.add_product(r, column, times_factor(sums.total(r, column), factors[r]), scale);
        else
          totals.add_product(r, column, to_floats(sums.total(r, column)), scale);
      });
    });
    if constexpr (Product::kHasFactors) factors += kRows;
    weights.next_segment();
  }
  totals.leave();
  if constexpr (Weights::kAddsMinimums) offsets.leave();
}

template <class Weights>
void multiply_rows(const Weights& weights, const Layout& layout, int64_t first, int64_t end, const Activations& x,
                   Ahead ahead, PanelTotals& panel) {
  const int64_t num_tiles = x.num_tiles();
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t row = x.first_row(tile), height = x.height(tile);
    unrolled<kTileRows>([&](auto below) HEADRACE_INLINE_BODY {
      if constexpr (below + 1 >= Weights::kFewestRows)
        if (height == below + 1) multiply_tile<below + 1>(weights, layout, first, end, x, row, ahead, panel);
    });
    ahead.address += ahead.tile_bytes;
  }
}

template <class Packed>
void multiply_panel(const uint8_t* segments, const Layout& layout, const Activations& x, PanelTotals& panel) {
  const int64_t num_totals = x.num_rows * kPanelWidth;
  std::fill_n(panel.totals, num_totals, 0.0f);
  if (Packed::kAddsMinimums) std::fill_n(panel.offsets, num_totals, 0.0f);
  static_assert(Packed::kDirectRows >= kTileRows, "or tiles may be lower than kFewestRows");
  const bool is_direct = x.num_rows <= Packed::kDirectRows;
  Chunk chunk;
  const int64_t num_chunks = divide_up(layout.num_segments * layout.segment, kChunkInputs);
  const int64_t chunk_segments = divide_up(layout.num_segments, num_chunks);
  for (int64_t first = 0; first < layout.num_segments; first += chunk_segments) {
    const int64_t end = std::min(first + chunk_segments, layout.num_segments);
    const Packed packed(segments, layout, first);
    const Ahead ahead(packed.header, layout.segment_bytes * (end - first),
                      (end - first) * layout.segment / (2 * kPairsPerStep), x.num_tiles());
    if (is_direct) {
      multiply_rows(packed, layout, first, end, x, ahead, panel);
    } else {
      chunk.expand(packed, layout, first, end);
      multiply_rows(ExpandedWeights<typename Packed::Product>(chunk, layout), layout, first, end, x, ahead, panel);
    }
  }
}

}  // namespace

void multiply_integers(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                       PanelTotals& sums) {
  const uint8_t* segments = weights.packed + panel * layout.panel_bytes + layout.channel_bytes;
  if (layout.has_byte_activations)
    multiply_panel<NibbleQuads>(segments, layout, x, sums);
  else if (layout.has_minimums)
    multiply_panel<NibbleWeights>(segments, layout, x, sums);
  else
    multiply_panel<ByteWeights>(segments, layout, x, sums);
}
