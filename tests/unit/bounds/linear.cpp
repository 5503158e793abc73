// Linear layers of awkward shapes, with rows that are not finite among the others.
#include "linear.h"

#include <cmath>
#include <vector>

#include "bounds.h"
#include "linear_layout.h"
#include "team.h"

extern "C" {
int64_t headrace_linear_packed_bytes(const LinearWeights* weights);
void headrace_linear_pack(Team* team, const LinearWeights* weights, const uint8_t* values, const uint16_t* scales,
                          const uint16_t* minimums, const float* channel_scales, uint8_t* target);
void headrace_linear(Team* team, const LinearWeights* weights, const float* x, int64_t x_stride, int64_t num_rows,
                     float* output, int64_t output_stride, int accumulates);
void headrace_linear_rows(const LinearWeights* weights, const int64_t* rows, int64_t num_rows, float* output,
                          int64_t output_stride);
}

int run_linear() {
  constexpr uint16_t kOne = 0x3c00;  // 1.0 in half precision
  const int64_t inputs[] = {1, 31, 48, 64, 192, 576, 1056};
  const int64_t outputs[] = {2, 50};
  const int64_t rows[] = {0, 1, 3, 5, 17, 70, 300};
  Team team(2, 50, nullptr);
  int num_calls = 0;
  constexpr int kNumFormats = 8;
  for (int kind = 0; kind <= kNumFormats; ++kind)
    for (int64_t num_inputs : inputs)
      for (int64_t num_outputs : outputs)
        for (int gate = 0; gate < 3; ++gate) {
          const std::vector<float> channel_scales(num_outputs, 1.0f), bias(num_outputs, 1.0f);
          const bool is_bytes = kind == kNumFormats;  // 4-bit weights again, with 8-bit activations
          const WeightFormat format = is_bytes ? WeightFormat::kInt4Group32 : WeightFormat(kind);
          LinearWeights weights{nullptr, bias.data(), num_inputs, num_outputs, format, Gate(gate), is_bytes ? 8 : 16};
          const Layout layout(weights);
          const bool has_groups = layout.header_bytes > 0;
          if (has_groups && num_inputs % layout.segment) continue;
          const int64_t groups = has_groups ? layout.num_segments : 1, width = gate ? num_outputs / 2 : num_outputs;
          const int64_t value_bytes = layout.is_float ? layout.value_bits / 8 : 1;
          const std::vector<uint8_t> values(num_outputs * num_inputs * value_bytes, 7);
          const std::vector<uint16_t> halves(num_outputs * groups, kOne);
          std::vector<uint8_t> packed(headrace_linear_packed_bytes(&weights));
          headrace_linear_pack(&team, &weights, values.data(), halves.data(), halves.data(), channel_scales.data(),
                               packed.data());
          weights.packed = packed.data();
          if (!gate) {
            const int64_t last = num_outputs - 1;
            std::vector<float> row(num_inputs);
            headrace_linear_rows(&weights, &last, 1, row.data(), num_inputs);
          }
          for (int64_t num_rows : rows) {
            if (num_rows > 70 && num_inputs > 192) continue;
            std::vector<float> x(num_rows * num_inputs, 0.5f), output(num_rows * width);
            if (num_rows > 3) x[num_inputs] = INFINITY, x[2 * num_inputs] = NAN, x[3 * num_inputs] = 1e38f;
            headrace_linear(&team, &weights, x.data(), num_inputs, num_rows, output.data(), width, num_calls % 2);
            ++num_calls;
          }
        }
  return num_calls;
}
