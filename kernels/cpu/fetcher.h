// Asks for memory that will be read soon, line by line, while something else is computed.
#pragma once

#include <cstdint>

constexpr int64_t kLineBytes = 64;

class Fetcher {
 public:
  // Goes through `num_runs` runs of `run_bytes`. The addresses are looked at as it goes.
  Fetcher(const char* const* runs, int num_runs, int64_t run_bytes)
      : runs_(runs), num_left_(num_runs), run_bytes_(run_bytes) {}

  // The next lines of a run, as many; past the last run, nothing. What lies behind a run's end may be asked for.
  template <int kLines>
  inline __attribute__((always_inline)) void step() {
    if (at_ >= end_) {
      if (num_left_ == 0) return;
      at_ = *runs_++, end_ = at_ + run_bytes_, --num_left_;
    }
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + kLineBytes * line);
    at_ += kLineBytes * kLines;
  }

 private:
  const char* const* runs_;
  int num_left_;
  int64_t run_bytes_;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};
