// Memory that a thread keeps from call to call: it grows and never shrinks, so that nothing is allocated once the sizes
// have settled.
#pragma once

#include <cstddef>
#include <vector>

class Scratch {
 public:
  // Runs `layout`, which takes its pieces, twice: to find out how much it needs, and to hand it out. What one layout
  // took, the next one of the same thread gets again.
  template <class Layout>
  static void lay_out(const Layout& layout) {
    static thread_local std::vector<float> memory;
    Scratch measure(nullptr);
    layout(measure);
    if (memory.size() < measure.taken_ + kLineFloats) memory.resize(measure.taken_ + kLineFloats);
    const size_t past_line = reinterpret_cast<size_t>(memory.data()) / sizeof(float) % kLineFloats;
    Scratch pieces(memory.data() + (kLineFloats - past_line) % kLineFloats);
    layout(pieces);
  }

  // Begins with a cache line; not initialised.
  float* take(size_t num_floats) {
    const size_t begin = taken_;
    taken_ += (num_floats + kLineFloats - 1) / kLineFloats * kLineFloats;
    return memory_ ? memory_ + begin : nullptr;
  }

 private:
  static constexpr size_t kLineFloats = 16;

  explicit Scratch(float* memory) : memory_(memory) {}

  float* memory_;
  size_t taken_ = 0;
};
