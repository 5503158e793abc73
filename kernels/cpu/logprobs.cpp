// Log-probabilities of rows of logits. What it computes: engine_service/raw_logprobs.py, which is its oracle.
#include <functional>
#include <vector>

#include "logit_blocks.h"
#include "team.h"

namespace {

constexpr int64_t kSharedRows = 4;  // with fewer, waking a thread costs more than it saves

struct RankedToken {
  float logit;  // tamed
  int32_t id;

  bool operator<(const RankedToken& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// What is told of a row.
struct Told {
  double* logprob;  // of the chosen token
  int64_t* rank;    // of the chosen token, from 1; equals share the better one
  int64_t* top_ids;
  double* top;
};

class RowLookup {
 public:
  RowLookup(const float* logits, int64_t vocab_size)
      : logits_(logits), vocab_size_(vocab_size), num_blocks_(num_blocks_of(vocab_size)) {}

  void tell(int64_t chosen, int64_t num_top, const Told& told) {
    const float largest = find_maxima();
    const double normaliser = normalise(largest, logits_[chosen], *told.rank);
    *told.logprob = double(logits_[chosen]) - normaliser;
    if (num_top) find_top(num_top);
    for (int64_t i = 0; i < num_top; ++i) {
      told.top_ids[i] = ranked_[i].id;
      told.top[i] = double(logits_[ranked_[i].id]) - normaliser;
    }
  }

 private:
  // Of each lane of each block; returns that of the row.
  float find_maxima() {
    maxima_.resize(size_t(num_blocks_ * kLanes));
    Vector largest_here = broadcast(-INFINITY);
    has_overflowed_ = false;
    for (int64_t index = 0; index < num_blocks_; ++index) {
      LogitBlock block(logits_, vocab_size_, index);
      const BlockSummary summary = summarised(block);
      has_overflowed_ |= !summary.is_tame;
      store(maxima_.data() + index * kLanes, load(summary.maxima));
      largest_here = larger(largest_here, load(summary.maxima));
    }
    return largest(largest_here);
  }

  // The logarithm of the sum of e^logit, NaN where that is no number; `rank`: one more than the logits above `chosen`.
  double normalise(float largest, float chosen, int64_t& rank) const {
    const Weighing weigh(largest, 1.0f);
    WideVector total = {};
    rank = 1;
    for (int64_t index = 0; index < num_blocks_; ++index) {
      const LogitBlock block(logits_, vocab_size_, index);
      IntVector num_above = {};
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        num_above -= load(block.values() + i) > broadcast(chosen);
        total += __builtin_convertvector(weigh(block.values() + i), WideVector);
      }
      for (int lane = 0; lane < kLanes; ++lane) rank += num_above[lane];
    }
    if (has_overflowed_ || largest == -INFINITY) return NAN;
    return double(largest) + std::log(sum(total));
  }

  // Fills ranked_ with so many of the best, at least: the best first, equals by their ids.
  void find_top(int64_t num_top) {
    // Different lanes have different tokens, so as many as there are lanes above a bound are above it, at least.
    float bound = -INFINITY;
    if (num_top <= int64_t(maxima_.size())) {
      best_.resize(size_t(num_top));
      std::partial_sort_copy(maxima_.begin(), maxima_.end(), best_.begin(), best_.end(), std::greater<float>());
      bound = best_.back();
    }
    ranked_.clear();
    for (int64_t index = 0; index < num_blocks_; ++index) {
      if (!any(load(maxima_.data() + index * kLanes) >= broadcast(bound))) continue;
      const LogitBlock block(logits_, vocab_size_, index, !has_overflowed_);
      const int64_t first = index * kBlock, count = std::min(kBlock, vocab_size_ - first);
      for (int64_t i = 0; i < count; i += kLanes) {
        if (!any(load(block.values() + i) >= broadcast(bound))) continue;
        for (int64_t j = i; j < std::min(i + kLanes, count); ++j)
          if (block.values()[j] >= bound) ranked_.push_back({block.values()[j], int32_t(first + j)});
      }
    }
    std::partial_sort(ranked_.begin(), ranked_.begin() + num_top, ranked_.end());
  }

  const float* logits_;
  const int64_t vocab_size_, num_blocks_;
  bool has_overflowed_ = false;
  std::vector<float> maxima_, best_;
  std::vector<RankedToken> ranked_;
};

}  // namespace

extern "C" {

// rows: [num_rows], each [vocab_size]. Results are [num_rows] and [num_rows, num_top]; num_top is at most vocab_size.
void headrace_logprobs(Team* team, const float* const* rows, int64_t num_rows, int64_t vocab_size,
                       const int64_t* chosen, int64_t num_top, double* logprobs, int64_t* ranks, int64_t* top_ids,
                       double* top) {
  const auto tell = [&](int64_t row) {
    RowLookup(rows[row], vocab_size)
        .tell(chosen[row], num_top, {logprobs + row, ranks + row, top_ids + row * num_top, top + row * num_top});
  };
  if (num_rows < kSharedRows) {
    for (int64_t row = 0; row < num_rows; ++row) tell(row);
    return;
  }
  team->each(num_rows, 1, [&](Range range) {
    for (int64_t row = range.first; row < range.end; ++row) tell(row);
  });
}

}  // extern "C"
