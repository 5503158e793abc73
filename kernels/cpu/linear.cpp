// The linear layer: blocks of rows, panels of outputs, and what is done to their sums.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "activations.h"
#include "amx_products.h"
#include "gates.h"
#include "integer_lanes.h"
#include "linear_layout.h"
#include "panel_products.h"
#include "team.h"

namespace {

constexpr int64_t kOwnRows = 4;  // so few rows are arranged sooner than handed out

// What turns the sums of a panel into results: `(total * scale) * row scale + bias`, padded to the panel's width.
struct PanelScale {
  float scales[kPanelWidth];
  float bias[kPanelWidth];
  bool has_offsets;

  PanelScale(const LinearWeights& weights, const Layout& layout, int64_t panel, int64_t first_output, int64_t count)
      : has_offsets(layout.has_minimums) {
    if (layout.has_channel_scales)
      std::memcpy(scales, weights.packed + panel * layout.panel_bytes, sizeof(scales));
    else
      std::fill_n(scales, kPanelWidth, 1.0f);
    std::fill_n(bias, kPanelWidth, 0.0f);
    if (weights.bias) std::memcpy(bias, weights.bias + first_output, size_t(count) * sizeof(float));
  }

  Floats apply(const PanelTotals& sums, int64_t row, float row_scale, int column) const {
    const int64_t at = row * kPanelWidth + column * kIntLanes;
    Floats total = load_floats(sums.totals + at);
    if (has_offsets) total = add_floats(total, load_floats(sums.offsets + at));
    total = multiply(total, load_floats(scales + column * kIntLanes));
    return multiply_add(total, broadcast_float(row_scale), load_floats(bias + column * kIntLanes));
  }
};

void multiply_panel(const LinearWeights& weights, const Layout& layout, int64_t panel, const Activations& x,
                    PanelTotals& sums) {
  if (x.is_amx())
    multiply_amx(weights, layout, panel, x, sums);
  else if (layout.is_float)
    multiply_floats(weights, layout, panel, x, sums);
  else
    multiply_integers(weights, layout, panel, x, sums);
}

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
    const float row_scale = x.scales[row];
    if (weights.gate == kNoGate && count == kPanelWidth) {
      for (int column = 0; column < kColumns; ++column) {
        Floats value = scale.apply(scratch[0], row, row_scale, column);
        if (output.accumulates) value = add_floats(value, load_floats(target + column * kIntLanes));
        store_floats(target + column * kIntLanes, value);
      }
      continue;
    }
    for (int column = 0; column < kColumns; ++column) {
      store_floats(result + column * kIntLanes, scale.apply(scratch[0], row, row_scale, column));
      if (weights.gate != kNoGate)
        store_floats(up + column * kIntLanes, up_scale.apply(scratch[1], row, row_scale, column));
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
    const auto arrange = [&](Range pieces) {
      for (int64_t piece = pieces.first; piece < pieces.end; ++piece)
        arrange_piece(block_input, layout, activations, piece);
    };
    if (activations.num_rows <= kOwnRows)
      arrange({0, activations.num_pieces()});
    else
      team.each(activations.num_pieces(), arrange);
    const LinearOutput block{output.rows + begin * output.stride, output.stride, output.accumulates};
    team.each(layout.num_units, [&](Range units) {
      const AmxSetting setting(layout, activations);
      PanelTotals sums[2];  // of a gate and of what it gates, or the first only
      for (int64_t unit = units.first; unit < units.end; ++unit)
        compute_unit(weights, layout, unit, activations, block, sums);
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
