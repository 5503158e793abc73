// Activations as the integers that quantised weights are multiplied with.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "linear_layout.h"

constexpr int64_t kMaxBlockRows = 256;

// How many rows are quantised and multiplied at once.
int64_t block_rows(const Layout& layout);

// Rows of activations as int16, each with a float scale. Rows are cut into tiles of nearly equal height (5 rows as
// 3 + 2, not 4 + 1). A tile is one run of [pair of inputs][row of the tile][2], in the order in which it is read.
struct Activations {
  int16_t* values;
  float* scales;      // [rows]
  float* group_sums;  // [tile][group][row of the tile]: sums of a segment's integers, where minimums need them
  int64_t num_inputs;
  int64_t num_groups;  // 0 without minimums
  int64_t num_rows;

  int64_t num_tiles() const { return divide_up(num_rows, kTileRows); }
  int64_t first_row(int64_t tile) const { return num_rows * tile / num_tiles(); }
};

// Quantises the rows of one tile of `target`; the input's row 0 is row 0 of `target`.
void quantize_tile(const LinearInput& input, const Activations& target, int64_t tile, int64_t num_inputs);
