// Activations as weights are multiplied with them: integers of 16 or 8 bits for quantised weights, floats for others.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "linear_layout.h"

constexpr int64_t kMaxBlockRows = 256;

// How many rows are arranged and multiplied at once.
int64_t block_rows(const Layout& layout);

// How the values of a tile lie in memory: in the order in which they are read.
enum class Arrangement {
  kPairs,     // int16 [pair of inputs][row][2]
  kQuads,     // int8 [quad of inputs][row][4], in the order of store_rounded_quads
  kAmxTiles,  // [block of inputs]{high parts [row][block], low parts alike}, as bytes or as bfloat16
  kFloats,    // float [input][row]
};

constexpr int kAmxTileRows = 16;

// Rows of activations, as 16-bit integers with a float scale each, or as floats, or as bytes: these are multiplied by a whole
// number that their group shares, which makes integers with a float scale for each row, too. Rows are cut into tiles of nearly equal
// height (5 rows as 2 + 3, not 4 + 1); AMX's are all of one height, and in the last one some rows may be unused.
struct Activations {
  Arrangement arrangement;
  int64_t value_bytes;
  uint8_t* values;    // aligned to 64 bytes
  float* scales;      // [rows]; of floats: ones
  float* group_sums;  // [tile][group][row]: sums of a segment's integers, where minimums need them
  QuadFactor* factors;  // likewise: of bytes
  int64_t num_inputs;
  int64_t num_groups;  // 0 without minimums
  int64_t num_rows;

  bool is_amx() const { return arrangement == Arrangement::kAmxTiles; }
  int64_t num_tiles() const { return divide_up(num_rows, is_amx() ? kAmxTileRows : kTileRows); }
  int64_t amx_height() const { return divide_up(num_rows, num_tiles()); }
  int64_t first_row(int64_t tile) const { return is_amx() ? tile * amx_height() : num_rows * tile / num_tiles(); }
  int64_t height(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  uint8_t* tile(int64_t index) const { return values + first_row(index) * num_inputs * value_bytes; }

  // Pieces of the arranging: they share no line of the cache.
  static constexpr int64_t kAmxPieceRows = 2;
  int64_t num_pieces() const { return is_amx() ? divide_up(num_rows, kAmxPieceRows) : num_tiles(); }
};

// Fills a piece of `target`; the input's row 0 is row 0 of `target`.
void arrange_piece(const LinearInput& input, const Layout& layout, const Activations& target, int64_t piece);
