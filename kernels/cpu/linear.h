// One linear layer with packed weights and a call of it; contracts in kernels/cpu/packed_linear.py, arithmetic in
// kernels/quantized_reference.py.
#pragma once

#include <cstdint>
#include <vector>

class Team;
struct Activations;
struct Layout;

enum class WeightFormat : int32_t {
  kInt8PerChannel = 0,  // one float scale per output
  kInt8Group32 = 1,     // one half scale per output and 32 inputs
  kInt8Group64 = 2,
  kInt4Group32 = 3,  // unsigned; a half scale and a half minimum per output and 32 inputs
  kFloat32 = 4,      // these three with float activations; all others with integers
  kBfloat16 = 5,
  kFloat16 = 6,
  kInt8Group16 = 7,
};

enum Gate : int32_t { kNoGate = 0, kSilu = 1, kGeluTanh = 2 };

// Read by kernels/cpu/packed_linear.py too, which fills it: keep the two alike.
struct LinearWeights {
  const uint8_t* packed;
  const float* bias;  // [num_outputs], or null
  int64_t num_inputs;
  int64_t num_outputs;  // rows of the weight; with a gate: of gate and up together, gate first
  WeightFormat format;
  Gate gate;
  // 8, for 4-bit weights: int8, which each group of 32 inputs multiplies by a factor of its own; 16: int16. A row has one
  // scale. For float weights it means nothing.
  int32_t activation_bits;
};

struct LinearInput {
  const float* rows;
  int64_t stride;     // in floats, from row to row
  const float* norm;  // [num_inputs]: the weight of an RMSNorm that each row goes through first, or null
  float norm_eps;

  LinearInput from(int64_t row) const { return {rows + row * stride, stride, norm, norm_eps}; }
};

struct LinearOutput {
  float* rows;
  int64_t stride;
  bool accumulates;  // += instead of =
};

// Memory for the activations of a call.
class LinearScratch {
 public:
  // Valid until the next call.
  Activations reserve(int64_t num_rows, const Layout& layout);

 private:
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> values_;
  std::vector<float> scales_;
  std::vector<float> group_sums_;
  std::vector<uint32_t> factors_;
};

// `output.rows` must not overlap `input.rows`.
void linear(Team& team, const LinearWeights& weights, const LinearInput& input, int64_t num_rows,
            const LinearOutput& output, LinearScratch& scratch);
