// One quantised linear layer and a call of it; contracts in kernels/cpu/packed_linear.py, arithmetic in
// kernels/quantized_reference.py.
#pragma once

#include <cstdint>

enum WeightFormat : int32_t {
  kInt8PerChannel = 0,  // one float scale per output
  kInt8Group32 = 1,     // one half scale per output and 32 inputs
  kInt8Group64 = 2,
  kInt4Group32 = 3,  // unsigned; a half scale and a half minimum per output and 32 inputs
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
  int32_t num_threads;
};
