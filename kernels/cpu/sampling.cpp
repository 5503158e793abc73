#include "sampling.h"

#include <vector>

#include "candidates.h"
#include "logit_blocks.h"
#include "team.h"

namespace {

constexpr int64_t kPartBlocks = 8;         // of a row that threads share: a few microseconds
constexpr int64_t kRowsPerThread = 4;      // with fewer, threads share rows, so that none waits long for the last
constexpr int64_t kSharedReads = 1 << 20;  // of logits: below this, waking a thread costs more than it saves
constexpr int64_t kReadsPerWeight = 6;     // that cost as much as weighing a logit
constexpr float kGuessFactor = 16;         // of the factors that were tried, the fastest on a model's logits

// One row on its way to a token: adjust, summarise all blocks, sum the weights of all blocks, choose.
class RowSampler {
 public:
  // `blocks`: for what is found out on the way.
  RowSampler(const SamplingRow& asked, float* logits, int64_t vocab_size, BlockSummary* blocks)
      : asked_(asked),
        logits_(logits),
        vocab_size_(vocab_size),
        num_blocks_(num_blocks_of(vocab_size)),
        blocks_(blocks) {}

  // In reads of logits.
  int64_t cost() const { return vocab_size_ * (needs_total() ? kReadsPerWeight : 1); }

  void adjust() const {
    if (asked_.adjustment) ::adjust(*asked_.adjustment, logits_, vocab_size_);
  }

  void summarise(Range blocks) const {
    for (int64_t index = blocks.first; index < blocks.end; ++index) {
      LogitBlock block(logits_, vocab_size_, index);
      if (is_greedy())
        store(blocks_[index].maxima, block.maxima());  // as they are: the first that is no number counts
      else
        blocks_[index] = summarised(block);
    }
  }

  void sum_weights(Range blocks) const {
    if (!needs_total()) return;
    const Weighing weigh = weighing();
    for (int64_t index = blocks.first; index < blocks.end; ++index) {
      const LogitBlock block = tame_block(index);
      WideVector total = {};
      for (int64_t i = 0; i < kBlock; i += kLanes)
        total += __builtin_convertvector(weigh(block.values() + i), WideVector);
      blocks_[index].total = sum(total);
    }
  }

  int64_t choose() const {
    if (is_greedy()) return first_largest();
    if (needs_total() && asked_.top_p >= 1) return draw_of_all();
    thread_local Candidates candidates;
    candidates.reset(vocab_size_);
    filter(candidates);
    return candidates.draw(asked_.number);
  }

 private:
  bool is_greedy() const { return asked_.temperature == 0; }

  bool has_top_k() const { return 0 < asked_.top_k && asked_.top_k < vocab_size_; }

  // The sum of all weights: where other filters leave few tokens, only these need to be weighed.
  bool needs_total() const { return !is_greedy() && !has_top_k() && asked_.min_p <= 0; }

  LogitBlock tame_block(int64_t index) const { return {logits_, vocab_size_, index, blocks_[index].is_tame}; }

  int64_t first_largest() const {
    int64_t best_block = 0;
    float best = -INFINITY;
    for (int64_t index = 0; index < num_blocks_; ++index)
      for (float logit : blocks_[index].maxima) {
        if (logit != logit) return first_in_block(index, [](float each) { return each != each; });
        if (logit > best) best = logit, best_block = index;
      }
    return first_in_block(best_block, [best](float each) { return each == best; });
  }

  template <class Is>
  int64_t first_in_block(int64_t index, const Is& is) const {
    int64_t token = index * kBlock;
    while (!is(logits_[token])) ++token;
    return token;
  }

  Weighing weighing() const {
    Vector found = load(blocks_[0].maxima);
    for (int64_t index = 1; index < num_blocks_; ++index) found = larger(found, load(blocks_[index].maxima));
    return {largest(found), asked_.temperature};
  }

  int64_t draw_of_all() const {
    const Place found = part_at(asked_.number, num_blocks_, [this](int64_t index) { return blocks_[index].total; });
    if (found.part < 0) return 0;
    const LogitBlock block = tame_block(found.part);
    const Weighing weigh = weighing();
    float weights[kBlock];
    for (int64_t i = 0; i < kBlock; i += kLanes) store(weights + i, weigh(block.values() + i));
    return found.part * kBlock + index_at(found, weights, kBlock);
  }

  // What min_p, top_k and top_p leave, each of what the ones before it left; and perhaps tokens without weight.
  void filter(Candidates& candidates) const {
    const Weighing weigh = weighing();
    if (needs_total()) return find_nucleus(weigh, candidates);
    float threshold = asked_.min_p;  // the largest weight is 1
    float bound = lowest_logit(threshold, weigh);
    if (has_top_k() && asked_.top_k <= num_blocks_ * kLanes) {
      std::vector<float>& maxima = weigh_maxima(weigh, candidates);
      const Cut cut = cut_where(maxima.data(), int64_t(maxima.size()), double(asked_.top_k), each);
      bound = std::max(bound, lowest_logit(cut.last, weigh));
    }
    gather(bound, weigh, candidates);
    if (has_top_k() && asked_.top_k < candidates.count())
      threshold = std::max(threshold, candidates.kth_largest_weight(asked_.top_k));
    if (threshold > 0) candidates.keep([threshold](float weight) { return weight >= threshold; });
    if (asked_.top_p < 1) candidates.keep_nucleus(asked_.top_p * candidates.total_weight());
  }

  // What top_p leaves of all tokens.
  void find_nucleus(const Weighing& weigh, Candidates& candidates) const {
    double total = 0;
    for (int64_t index = 0; index < num_blocks_; ++index) total += blocks_[index].total;
    const double limit = asked_.top_p * total;
    // Below this there is at most (1 - top_p) / 2 of the total, however many tokens that are.
    const float floor = float((1 - asked_.top_p) * total / (2 * double(vocab_size_)));
    // Mostly far fewer tokens suffice. About how heavy these are the maxima of lanes tell, who are among them.
    std::vector<float>& maxima = weigh_maxima(weigh, candidates);
    const int64_t num_maxima = int64_t(maxima.size());
    const double limit_of_maxima = asked_.top_p * sum_of(maxima.data(), num_maxima);
    float guess = cut_where(maxima.data(), num_maxima, limit_of_maxima, weight_of).last / kGuessFactor;
    for (; guess > floor; guess /= kGuessFactor) {
      gather(lowest_logit(guess, weigh), weigh, candidates);
      if (candidates.total_weight(guess) >= limit) break;
      candidates.reset(vocab_size_);
    }
    if (!(guess > floor)) gather(lowest_logit(floor, weigh), weigh, candidates);
    candidates.keep_nucleus(limit);
  }

  void gather(float bound, const Weighing& weigh, Candidates& candidates) const {
    for (int64_t index = 0; index < num_blocks_; ++index) {
      if (!any(load(blocks_[index].maxima) >= broadcast(bound))) continue;
      const LogitBlock block = tame_block(index);
      for (int64_t i = 0; i < kBlock; i += Candidates::kRun)
        candidates.add_run(block.values() + i, weigh, bound, index * kBlock + i);
    }
  }

  // Each of them is the weight of a token of its own.
  std::vector<float>& weigh_maxima(const Weighing& weigh, Candidates& scratch) const {
    std::vector<float>& weights = scratch.memory();
    weights.resize(size_t(num_blocks_ * kLanes));
    for (int64_t index = 0; index < num_blocks_; ++index)
      store(weights.data() + index * kLanes, weigh(blocks_[index].maxima));
    return weights;
  }

  // No token of this weight has a lower logit. A little too low, since weights are rounded: by less than a hundred
  // thousandth of their exponent. Not so low that tokens have no weight at all.
  static float lowest_logit(float weight, const Weighing& weigh) {
    constexpr float kLeastWeight = 1e-38f;  // about e^-87
    const double exponent = std::log(double(std::max(weight, kLeastWeight))) * (1 + 1e-5) - 1e-5;
    const double bound = weigh.shift + weigh.temperature * exponent - 1e-6 * std::abs(weigh.shift);
    return float(std::max(bound, -double(FLT_MAX)));
  }

  const SamplingRow& asked_;
  float* logits_;
  const int64_t vocab_size_, num_blocks_;
  BlockSummary* blocks_;
};

constexpr SamplingRow kGreedy = {};

}  // namespace

extern "C" {

// logits: [num_rows, vocab_size], changed where a row is adjusted. rows: null if all take the largest of what there is.
void headrace_sample(Team* team, float* logits, int64_t stride, int64_t num_rows, int64_t vocab_size,
                     const SamplingRow* rows, int64_t* tokens) {
  thread_local std::vector<BlockSummary> memory;
  const int64_t num_blocks = num_blocks_of(vocab_size), num_parts = (num_blocks + kPartBlocks - 1) / kPartBlocks;
  memory.resize(std::max(memory.size(), size_t(num_rows * num_blocks)));
  BlockSummary* summaries = memory.data();  // those of this thread, also where others fill them
  const auto sampler = [=](int64_t row) {
    return RowSampler(rows ? rows[row] : kGreedy, logits + row * stride, vocab_size, summaries + row * num_blocks);
  };
  const auto whole_row = [&](int64_t row) {
    const RowSampler sample = sampler(row);
    sample.adjust();
    sample.summarise({0, num_blocks});
    sample.sum_weights({0, num_blocks});
    tokens[row] = sample.choose();
  };
  const auto for_rows = [&](const auto& body) {
    team->each(num_rows, 1, [&](Range range) {
      for (int64_t row = range.first; row < range.end; ++row) body(row);
    });
  };
  const auto for_parts = [&](const auto& body) {
    team->each(num_rows * num_parts, 1, [&](Range range) {
      for (int64_t part = range.first; part < range.end; ++part) {
        const int64_t first = part % num_parts * kPartBlocks;
        body(sampler(part / num_parts), Range{first, std::min(first + kPartBlocks, num_blocks)});
      }
    });
  };
  int64_t cost = 0;
  for (int64_t row = 0; row < num_rows; ++row) cost += sampler(row).cost();
  if (cost < kSharedReads) {
    for (int64_t row = 0; row < num_rows; ++row) whole_row(row);
  } else if (num_rows >= kRowsPerThread * team->num_threads()) {
    for_rows(whole_row);
  } else {
    for_rows([&](int64_t row) { sampler(row).adjust(); });
    for_parts([](const RowSampler& sample, Range blocks) { sample.summarise(blocks); });
    for_parts([](const RowSampler& sample, Range blocks) { sample.sum_weights(blocks); });
    for_rows([&](int64_t row) { tokens[row] = sampler(row).choose(); });
  }
}

}  // extern "C"
