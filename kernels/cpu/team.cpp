#include "team.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace {

constexpr int64_t kChunksPerThread = 8;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How often a waiting thread looks before it sleeps: `relax` takes 5 to 50 ns, as the processor likes.
int spins_in(int microseconds) {
  constexpr int kTrials = 2000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kTrials; ++i) relax();
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start;
  return int(microseconds * kTrials / std::max(taken.count(), 1.0));
}

void pin(std::thread& thread, int cpu) {
#if defined(__linux__)
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  pthread_setaffinity_np(thread.native_handle(), sizeof(only), &only);  // refused: it runs where it may
#else
  (void)thread, (void)cpu;
#endif
}

}  // namespace

int Worker::count() const { return team_.num_threads_; }

bool Worker::take(int64_t total, int64_t chunk, Range& range) {
  range.first = team_.taken_.fetch_add(chunk, std::memory_order_relaxed);
  range.end = std::min(range.first + chunk, total);
  return range.first < total;
}

bool Worker::take(int64_t total, Range& range) {
  return take(total, std::max<int64_t>(1, total / (kChunksPerThread * team_.num_threads_)), range);
}

void Worker::barrier() { team_.arrive(); }

Team::Team(int num_threads, int spin_us, const int* cpus)
    : num_threads_(std::max(1, num_threads)), num_spins_(num_threads_ > 1 ? spins_in(spin_us) : 0) {
  for (int index = 1; index < num_threads_; ++index) {
    threads_.emplace_back([this, index] { serve(index); });
    if (cpus) pin(threads_.back(), cpus[index - 1]);
  }
}

Team::~Team() {
  job_ = nullptr;
  num_jobs_.fetch_add(1, std::memory_order_release);
  num_jobs_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(Job job, void* argument) {
  const std::lock_guard<std::mutex> only(mutex_);
  if (num_threads_ > 1) {
    job_ = job;
    argument_ = argument;
    num_jobs_.fetch_add(1, std::memory_order_release);
    num_jobs_.notify_all();
  }
  Worker first(*this, 0);
  job(first, argument);
  arrive();  // also makes the counter of `take` ready for the next job
}

void Team::serve(int index) {
  for (uint32_t seen = 0;;) {
    await_change(num_jobs_, seen);
    ++seen;  // one at a time: the next job begins only when all have ended this one
    if (!job_) return;
    Worker worker(*this, index);
    job_(worker, argument_);
    arrive();
  }
}

void Team::arrive() {
  if (num_threads_ == 1) {
    taken_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = num_phases_.load(std::memory_order_relaxed);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
    await_change(num_phases_, phase);
    return;
  }
  num_arrived_.store(0, std::memory_order_relaxed);
  taken_.store(0, std::memory_order_relaxed);
  num_phases_.store(phase + 1, std::memory_order_release);
  num_phases_.notify_all();
}

void Team::await_change(std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < num_spins_; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
}

extern "C" {

Team* headrace_team_create(int num_threads, int spin_us, const int* cpus) {
  return new Team(num_threads, spin_us, cpus);
}

void headrace_team_destroy(Team* team) { delete team; }

}  // extern "C"
