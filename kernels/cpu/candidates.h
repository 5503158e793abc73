// The tokens that may be drawn, and how they become fewer without being sorted.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "inverse.h"
#include "logit_blocks.h"

// Where weights, from the heaviest to the lightest, are cut.
struct Cut {
  float last;     // the lightest weight that stays
  double before;  // what those that are heavier measure together
};

inline double each(float) { return 1; }
inline double weight_of(float weight) { return weight; }

// The cut at which what the staying weights measure together reaches `limit`, or behind the last that measures any.
// Weights are between 0 and 1, and changed; equal ones are not told from each other.
template <class Measure>
Cut cut_where(float* weights, int64_t count, double limit, const Measure& measure) {
  // Floats that are not negative have the order of their bits, of which those up to 1 use 30. We find these in pieces,
  // each from what the weights measure that have the pieces before it in common.
  uint32_t last = 0;
  double before = 0;
  for (int shift : {22, 14, 7, 0}) {
    const uint32_t mask = shift < 14 ? 127 : 255;
    double sums[4][256] = {};  // four of them, since an addition that waits for the one before it is slow
    for (int64_t i = 0; i < count; ++i)
      sums[i & 3][std::bit_cast<uint32_t>(weights[i]) >> shift & mask] += measure(weights[i]);
    uint32_t found = 0;
    double before_found = before;
    for (int digit = int(mask); digit >= 0 && before < limit; --digit) {
      const double sum = (sums[0][digit] + sums[1][digit]) + (sums[2][digit] + sums[3][digit]);
      if (sum == 0) continue;
      found = uint32_t(digit), before_found = before;
      before += sum;
    }
    last = last * (mask + 1) + found, before = before_found;
    int64_t num_alike = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float weight = weights[i];
      weights[num_alike] = weight;
      num_alike += std::bit_cast<uint32_t>(weight) >> shift == last;
    }
    count = num_alike;
    if (count == 1) return {weights[0], before};
  }
  return {std::bit_cast<float>(last), before};
}

// In the order of their ids. Of one thread, and kept: fresh pages cost more than a row.
class Candidates {
 public:
  static constexpr int64_t kRun = 64;  // tokens that are looked at more closely or not at all
  static_assert(kBlock % kRun == 0 && kRun % kLanes == 0);

  void reset(int64_t vocab_size) {
    if (weights_.size() < size_t(vocab_size + kRun)) {
      weights_.resize(size_t(vocab_size + kRun));
      ids_.resize(size_t(vocab_size + kRun));
    }
    count_ = 0;
  }

  int64_t count() const { return count_; }

  // For whoever needs some in between.
  std::vector<float>& memory() { return memory_; }

  // Those of a run of tame logits that are at least `bound`.
  void add_run(const float* logits, const Weighing& weigh, float bound, int64_t first_id) {
    Vector highest = load(logits);
    for (int64_t i = kLanes; i < kRun; i += kLanes) highest = larger(highest, load(logits + i));
    if (!any(highest >= broadcast(bound))) return;
    float weights[kRun];
    for (int64_t i = 0; i < kRun; i += kLanes) store(weights + i, weigh(logits + i));
    int64_t count = count_;
    for (int64_t i = 0; i < kRun; ++i) {  // without branches, as in `keep`
      weights_[count] = weights[i];
      ids_[count] = int32_t(first_id + i);
      count += logits[i] >= bound;
    }
    count_ = count;
  }

  // Of `k` <= count().
  float kth_largest_weight(int64_t k) {
    memory_.assign(weights_.begin(), weights_.begin() + count_);
    return cut_where(memory_.data(), count_, double(k), each).last;
  }

  // Drops those for which keeps(weight) is false. Without branches: they could not be foreseen.
  template <class Keeps>
  void keep(Keeps&& keeps) {
    int64_t count = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const float weight = weights_[i];
      weights_[count] = weight;
      ids_[count] = ids_[i];
      count += keeps(weight);
    }
    count_ = count;
  }

  double total_weight() const { return sum_of(weights_.data(), count_); }

  // Of those that have this weight or more.
  double total_weight(float least) const { return sum_of(weights_.data(), count_, least); }

  // Leaves the fewest tokens whose weights reach `limit`: a token stays if the sum of those before it in the order of
  // weights, equal ones in that of ids, is below it.
  void keep_nucleus(double limit) {
    memory_.assign(weights_.begin(), weights_.begin() + count_);
    const auto [last, before] = cut_where(memory_.data(), count_, limit, weight_of);
    int64_t num_left = 1;  // of those that weigh as much as the last one
    if (last > 0) num_left = std::max(num_left, int64_t(std::min((limit - before) / last, double(count_))));
    while (num_left > 1 && before + double(num_left - 1) * last >= limit) --num_left;
    while (num_left < count_ && before + double(num_left) * last < limit) ++num_left;
    keep([&](float weight) {
      const bool is_last = weight == last, stays = (weight > last) | (is_last & (num_left > 0));
      num_left -= is_last;
      return stays;
    });
  }

  // The first token whose cumulative share exceeds `number`; 0 if none has weight.
  int64_t draw(double number) const {
    const auto part = [this](int64_t index) {
      return sum_of(weights_.data() + index * kBlock, std::min(kBlock, count_ - index * kBlock));
    };
    const Place found = part_at(number, (count_ + kBlock - 1) / kBlock, part);
    if (found.part < 0) return 0;
    const int64_t first = found.part * kBlock;
    return ids_[first + index_at(found, weights_.data() + first, std::min(kBlock, count_ - first))];
  }

 private:
  std::vector<float> weights_, memory_;
  std::vector<int32_t> ids_;
  int64_t count_ = 0;
};
