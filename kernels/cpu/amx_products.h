// Panels of quantised weights by AMX, which multiplies tiles of 16 rows with 16 outputs: where it is compiled in and the
// kernel lets this process use it, for enough rows. Same results as integer_products.cpp, bit by bit.
#pragma once

#include <cstdint>

#include "activations.h"
#include "panel_products.h"

// Whether a call with so many rows takes this way.
bool uses_amx(const Layout& layout, int64_t num_rows);

int64_t amx_value_bytes(const Layout& layout);

// One row of a tile that has room for `height`.
void place_in_amx_tile(const int16_t* values, const Layout& layout, int64_t height, int64_t row, uint8_t* tile);

// While it lives, the calling thread can call multiply_amx on `x`.
class AmxSetting {
 public:
  AmxSetting(const Layout& layout, const Activations& x);
  ~AmxSetting();
  AmxSetting(const AmxSetting&) = delete;
  AmxSetting& operator=(const AmxSetting&) = delete;

 private:
  const bool is_set_;
};

// As multiply_integers, of x arranged as Arrangement::kAmxTiles.
void multiply_amx(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                  PanelTotals& sums);
