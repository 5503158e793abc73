// A row of logits in blocks, and what both drawing and log-probabilities need of them.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "vector.h"

constexpr int64_t kBlock = 512;  // tokens whose weights are summed at once

inline int64_t num_blocks_of(int64_t vocab_size) { return (vocab_size + kBlock - 1) / kBlock; }

inline bool any(const IntVector& lanes) {
  int64_t words[sizeof(IntVector) / sizeof(int64_t)], found = 0;
  std::memcpy(words, &lanes, sizeof(lanes));
  for (int64_t word : words) found |= word;
  return found != 0;
}

// What a model that has overflowed says, as numbers to draw with: what is no number is -inf.
inline Vector tamed(Vector logits) {
  const Vector otherwise = logits > broadcast(FLT_MAX) ? broadcast(FLT_MAX / 2) : broadcast(-INFINITY);
  return logits <= broadcast(FLT_MAX) ? logits : otherwise;
}

// The logits of one block, followed by -inf where the row ends within it.
class LogitBlock {
 public:
  LogitBlock(const float* row, int64_t vocab_size, int64_t index, bool is_tame = true) : values_(row + index * kBlock) {
    const int64_t count = std::min(kBlock, vocab_size - index * kBlock);
    if (count < kBlock) {
      std::copy_n(values_, count, own_);
      std::fill(own_ + count, own_ + kBlock, -INFINITY);
      values_ = own_;
    }
    if (!is_tame) tame();
  }
  LogitBlock(const LogitBlock&) = delete;
  LogitBlock& operator=(const LogitBlock&) = delete;

  void tame() {
    for (int64_t i = 0; i < kBlock; i += kLanes) store(own_ + i, tamed(load(values_ + i)));
    values_ = own_;
  }

  const float* values() const { return values_; }

  // Of each lane; what is no number is larger than any.
  Vector maxima() const {
    // Four at a time, as each waits for the one before it.
    Vector found[4];
    for (int j = 0; j < 4; ++j) found[j] = load(values_ + j * kLanes);
    for (int64_t i = 4 * kLanes; i < kBlock; i += 4 * kLanes)
      for (int j = 0; j < 4; ++j) found[j] = largest_or_nan(found[j], load(values_ + i + j * kLanes));
    return largest_or_nan(largest_or_nan(found[0], found[1]), largest_or_nan(found[2], found[3]));
  }

 private:
  static Vector largest_or_nan(Vector a, Vector b) { return (b > a) | (b != b) ? b : a; }

  const float* values_;
  float own_[kBlock];
};

struct BlockSummary {
  float maxima[kLanes];  // of each lane, tamed: different lanes see different tokens
  bool is_tame;          // all of it is as `tamed` would have it
  double total;          // of weights
};

// May tame the block.
inline BlockSummary summarised(LogitBlock& block) {
  BlockSummary found{};
  Vector maxima = block.maxima();
  found.is_tame = !any(!(maxima <= broadcast(FLT_MAX)));
  if (!found.is_tame) {
    block.tame();
    maxima = block.maxima();
  }
  store(found.maxima, maxima);
  return found;
}

// Unnormalised probabilities: e^((logit - largest) / temperature), 0 below e^-87; the largest of a row is 1.
struct Weighing {
  float shift, temperature;

  // At least so much is subtracted, lest a row without numbers becomes inf - inf. Before the division, so that a tiny
  // temperature gives -inf.
  Weighing(float largest, float temperature) : shift(std::max(largest, -FLT_MAX / 2)), temperature(temperature) {}

  // Of tame logits.
  Vector operator()(const float* logits) const { return exponential((load(logits) - shift) / temperature); }
};

typedef double WideVector __attribute__((vector_size(kLanes * sizeof(double))));

inline double sum(const WideVector& value) {
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}
