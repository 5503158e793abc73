// From the logits of a step's rows to its tokens, without a sort. What it computes: engine_service/sampler.py, which is
// its oracle.
#pragma once

#include <cstdint>

// Both are read by kernels/cpu/sampling.py too, which fills them: keep them alike. Pointers of nothing may be null.

// kernels/sampling_metadata.py says what each does. They are applied in this order.
struct LogitAdjustment {
  const int32_t* biased;  // token ids, each once
  const float* biases;
  int64_t num_biased;
  const int32_t* token_ids;  // of prompt and output
  int64_t num_tokens;
  int64_t num_prompt_tokens;
  float repetition_penalty;
  double presence_penalty;
  double frequency_penalty;
  const int32_t* allowed;  // if there are any, no others may come
  int64_t num_allowed;
  const int32_t* barred;
  int64_t num_barred;
  const uint8_t* mask;  // null, or a bit for each token that may come; tokens behind its end may not
  int64_t mask_bytes;
};

struct SamplingRow {
  const LogitAdjustment* adjustment;  // null: none
  float temperature;                  // 0: the largest logit is taken, and nothing below matters
  float min_p;
  int64_t top_k;  // 0: no limit
  double top_p;
  double number;  // in [0, 1)
};

// Changes a row of logits [vocab_size] in place.
void adjust(const LogitAdjustment& adjustment, float* logits, int64_t vocab_size);
