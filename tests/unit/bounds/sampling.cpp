// Steps of rows that ask for all there is, over vocabularies that end within a block or a register.
#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include "bounds.h"
#include "team.h"

extern "C" {
void headrace_sample(Team* team, float* logits, int64_t stride, int64_t num_rows, int64_t vocab_size,
                     const SamplingRow* rows, int64_t* tokens);
void headrace_logprobs(Team* team, const float* const* rows, int64_t num_rows, int64_t vocab_size,
                       const int64_t* chosen, int64_t num_top, double* logprobs, int64_t* ranks, int64_t* top_ids,
                       double* top);
}

namespace {

// Each row in memory of its own, so that what lies behind it is nobody's; values of all kinds.
std::vector<std::vector<float>> make_rows(size_t num_rows, size_t vocab_size, int kind) {
  const float special[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
  const std::vector<float> empty(vocab_size, 0.0f);
  std::vector<std::vector<float>> rows(num_rows, empty);
  uint32_t state = 1;
  for (std::vector<float>& row : rows)
    for (float& logit : row) {
      state = state * 1664525 + 1013904223;
      logit = kind == 0 ? 0.0f : kind == 1 ? float(state >> 16) / 4096 : (state >> 20) % 9 ? 1.0f : special[state >> 30];
    }
  return rows;
}

}  // namespace

int run_sampling() {
  Team team(2, 50, nullptr);
  int num_calls = 0;
  const int64_t sizes[] = {1, 2, 7, 511, 512, 513, 4100};
  for (int64_t size : sizes)
    for (int kind = 0; kind < 3; ++kind) {
      const int32_t ids[] = {0, int32_t(size - 1), int32_t(size / 2), int32_t(size - 1)};
      const float biases[] = {1.0f, -1.0f};
      const std::vector<uint8_t> mask(size_t((size + 7) / 8), 0x55), short_mask(size_t(size / 16 + 1), 0xff);
      LogitAdjustment penalties{};
      penalties.biased = ids, penalties.biases = biases, penalties.num_biased = size > 1 ? 2 : 1;
      penalties.token_ids = ids, penalties.num_tokens = 4, penalties.num_prompt_tokens = 1;
      penalties.repetition_penalty = 1.5f, penalties.presence_penalty = 0.5, penalties.frequency_penalty = 0.5;
      penalties.barred = ids, penalties.num_barred = 1;
      LogitAdjustment masked{}, allowed{};
      masked.repetition_penalty = allowed.repetition_penalty = 1.0f;
      masked.mask = mask.data(), masked.mask_bytes = int64_t(mask.size());
      allowed.allowed = ids, allowed.num_allowed = 3;
      allowed.mask = short_mask.data(), allowed.mask_bytes = int64_t(short_mask.size());
      const SamplingRow asked[] = {
          {nullptr, 0.0f, 0.0f, 0, 1.0, 0.0},          {&penalties, 0.8f, 0.0f, 0, 1.0, 1 - 0x1p-53},
          {&masked, 0.8f, 0.0f, 0, 0.9, 1 - 0x1p-53},  {&allowed, 0.8f, 0.0f, 50, 0.9, 0.5},
          {nullptr, 1e-5f, 0.1f, 5000, 1.0, 1 - 0x1p-53}, {nullptr, 2.0f, 0.0f, 0, 1e-300, 0.0},
          {nullptr, 1.0f, 0.0f, 0, 0.999, 1 - 0x1p-53}, {nullptr, 1.0f, 1.0f, 3, 0.5, 0.5},
      };
      constexpr int kRows = 8;
      for (int num_rows : {1, 3, kRows}) {
        // A row of each kind alone, and all rows in one piece of memory.
        std::vector<std::vector<float>> rows = make_rows(num_rows, size, kind);
        std::vector<float> together;
        for (std::vector<float>& row : rows) {
          together.insert(together.end(), row.begin(), row.end());
          int64_t token = -1;
          headrace_sample(&team, row.data(), size, 1, size, asked + num_calls++ % kRows, &token);
          if (token < 0 || token >= size) return -1;
        }
        std::vector<int64_t> tokens(size_t(num_rows), -1);
        const bool is_greedy = num_calls % 5 == 0;
        headrace_sample(&team, together.data(), size, num_rows, size, is_greedy ? nullptr : asked, tokens.data());
        std::vector<const float*> addresses;
        for (const std::vector<float>& row : rows) addresses.push_back(row.data());
        for (int64_t num_top : {int64_t(0), std::min<int64_t>(size, 20), size}) {
          std::vector<double> logprobs(tokens.size()), top(size_t(num_rows * num_top));
          std::vector<int64_t> ranks(tokens.size()), top_ids(size_t(num_rows * num_top));
          headrace_logprobs(&team, addresses.data(), num_rows, size, tokens.data(), num_top, logprobs.data(),
                            ranks.data(), top_ids.data(), top.data());
          ++num_calls;
        }
      }
    }
  // Enough to be shared by the threads: by parts of rows, and by rows.
  for (const auto& [num_rows, size] : {std::pair(2, 90000), std::pair(9, 20000)}) {
    const std::vector<float> row = make_rows(1, size_t(size), 1)[0];
    std::vector<float> logits;
    for (int index = 0; index < num_rows; ++index) logits.insert(logits.end(), row.begin(), row.end());
    const std::vector<SamplingRow> rows(size_t(num_rows), {nullptr, 1.0f, 0.0f, 0, 0.9, 0.5});
    std::vector<int64_t> tokens(rows.size());
    headrace_sample(&team, logits.data(), size, num_rows, size, rows.data(), tokens.data());
    ++num_calls;
  }
  return num_calls;
}
