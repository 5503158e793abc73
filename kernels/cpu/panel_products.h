// The product of one panel of weights and a block of rows: the inner loops of the linear layer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "activations.h"
#include "integer_lanes.h"
#include "linear.h"
#include "linear_layout.h"

// What the rows of a block sum up over a panel, in units of the scales: [rows, kPanelWidth].
struct PanelTotals {
  alignas(64) float totals[kMaxBlockRows * kPanelWidth];
  // Minimums' part, where there are some: apart, so that it may be added segment by segment or ahead of the products and
  // still round alike.
  alignas(64) float offsets[kMaxBlockRows * kPanelWidth];
};

// Which packed weights to fetch while others are multiplied. A single tile reads its own a little ahead; several
// share out the next chunk, which follows in memory. After the last panel that is nothing of ours: prefetching does
// not care.
struct Ahead {
  const uint8_t* address;
  int64_t step_bytes;  // for each step of a tile
  int64_t tile_bytes;

  // `chunk`: of `bytes`, which each tile goes through in `num_steps`.
  Ahead(const uint8_t* chunk, int64_t bytes, int64_t num_steps, int64_t num_tiles)
      : address(chunk + (num_tiles == 1 ? kSingleTileBytes : bytes)),
        step_bytes(divide_up(bytes, num_steps * num_tiles)),
        tile_bytes(bytes / num_tiles) {}

  void fetch_step() {
    for (const uint8_t* line = address; line < address + step_bytes; line += 64) __builtin_prefetch(line);
    address += step_bytes;
  }

  static constexpr int64_t kSingleTileBytes = 4096;
};

// Each sets `sums` for the panel of that number; x is arranged as it wants (activations.h).
void multiply_integers(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                       PanelTotals& sums);
void multiply_floats(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                     PanelTotals& sums);
