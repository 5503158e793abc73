#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "sampling.h"
#include "vector.h"

namespace {

// How often each token was met, of tokens met one after the other. Of one thread, and empty between two uses, so that a
// use costs as much as the tokens that it meets and not as much as a vocabulary.
class TokenCounts {
 public:
  // Calls first(token) when a token is met for the first time.
  template <class First>
  void meet(const int32_t* tokens, int64_t num_tokens, int64_t vocab_size, const First& first) {
    if (counts_.size() < size_t(vocab_size)) counts_.resize(size_t(vocab_size));
    for (int64_t i = 0; i < num_tokens; ++i)
      if (counts_[tokens[i]]++ == 0) first(tokens[i]);
  }

  int32_t of(int32_t token) const { return counts_[token]; }

  void forget(const int32_t* tokens, int64_t num_tokens) {
    for (int64_t i = 0; i < num_tokens; ++i) counts_[tokens[i]] = 0;
  }

 private:
  std::vector<int32_t> counts_;
};

void penalise(const LogitAdjustment& adjustment, float* logits, int64_t vocab_size) {
  thread_local TokenCounts counts;
  if (adjustment.repetition_penalty != 1.0f) {
    counts.meet(adjustment.token_ids, adjustment.num_tokens, vocab_size, [&](int32_t token) {
      const float logit = logits[token], penalty = adjustment.repetition_penalty;
      logits[token] = logit > 0 ? logit / penalty : logit * penalty;
    });
    counts.forget(adjustment.token_ids, adjustment.num_tokens);
  }
  if (adjustment.presence_penalty == 0 && adjustment.frequency_penalty == 0) return;
  const int32_t* output = adjustment.token_ids + adjustment.num_prompt_tokens;
  const int64_t num_output = adjustment.num_tokens - adjustment.num_prompt_tokens;
  counts.meet(output, num_output, vocab_size, [](int32_t) {});
  for (int64_t i = 0; i < num_output; ++i) {
    const int32_t count = counts.of(output[i]);
    if (count == 0) continue;  // done
    logits[output[i]] -= float(adjustment.frequency_penalty * count + adjustment.presence_penalty);
    counts.forget(output + i, 1);
  }
}

constexpr float kLowest = -FLT_MAX / 2;  // half, so that the largest can be subtracted

// One of these has to be drawn also where the model has overflowed, so none of them stays -inf.
void keep_allowed(const LogitAdjustment& adjustment, float* logits, int64_t vocab_size) {
  thread_local std::vector<float> kept;
  kept.clear();
  for (int64_t i = 0; i < adjustment.num_allowed; ++i) {
    const float logit = logits[adjustment.allowed[i]];
    kept.push_back(logit >= -FLT_MAX ? logit : kLowest);
  }
  std::fill_n(logits, vocab_size, -INFINITY);
  for (int64_t i = 0; i < adjustment.num_allowed; ++i) logits[adjustment.allowed[i]] = kept[i];
}

void keep_masked(const uint8_t* mask, int64_t mask_bytes, float* logits, int64_t vocab_size) {
  const int64_t told = std::min(vocab_size, mask_bytes * 8);
  int64_t i = 0;
  for (; i + 32 <= told; i += 32) {
    uint32_t bits;
    std::memcpy(&bits, mask + i / 8, sizeof(bits));  // the first token is the lowest bit on little-endian machines
    IntVector lane_bits;
    for (int lane = 0; lane < kLanes; ++lane) lane_bits[lane] = 1 << lane;
    for (int64_t j = i; j < i + 32; j += kLanes, bits >>= kLanes) {
      const Vector logits_here = load(logits + j);
      const Vector raised = logits_here >= broadcast(kLowest) ? logits_here : broadcast(kLowest);
      const IntVector is_allowed = ((lane_bits & int32_t(bits)) != 0);
      store(logits + j, is_allowed ? raised : broadcast(-INFINITY));
    }
  }
  for (; i < vocab_size; ++i) {
    const bool is_allowed = i < told && (mask[i / 8] >> (i % 8) & 1);
    logits[i] = !is_allowed ? -INFINITY : logits[i] >= kLowest ? logits[i] : kLowest;
  }
}

}  // namespace

void adjust(const LogitAdjustment& adjustment, float* logits, int64_t vocab_size) {
  for (int64_t i = 0; i < adjustment.num_biased; ++i) logits[adjustment.biased[i]] += adjustment.biases[i];
  penalise(adjustment, logits, vocab_size);
  if (adjustment.num_allowed) keep_allowed(adjustment, logits, vocab_size);
  for (int64_t i = 0; i < adjustment.num_barred; ++i) logits[adjustment.barred[i]] = -INFINITY;
  if (adjustment.mask) keep_masked(adjustment.mask, adjustment.mask_bytes, logits, vocab_size);
}
