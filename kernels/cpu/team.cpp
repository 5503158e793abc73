#include "team.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace {

constexpr int kSpinsPerYield = 32;

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

uint32_t next_chunk(uint64_t tickets) { return uint32_t(tickets); }
uint32_t num_chunks(uint64_t tickets) { return uint32_t(tickets >> 32); }

}  // namespace

Team::Team(int num_threads, int spin_us, const int* cpus)
    : num_threads_(std::max(1, num_threads)), num_spins_(num_threads_ > 1 ? spins_in(spin_us) : 0) {
  for (int index = 1; index < num_threads_; ++index) {
    threads_.emplace_back([this] { serve(); });
    if (cpus) pin(threads_.back(), cpus[index - 1]);
  }
}

Team::~Team() {
  is_ending_.store(true, std::memory_order_relaxed);
  num_phases_.fetch_add(1, std::memory_order_release);
  num_phases_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(int64_t total, int64_t chunk, Job job, const void* argument) {
  if (total <= 0) return;
  chunk = std::max(chunk, (total >> 31) + 1);  // chunks are numbered in 32 bits
  if (num_threads_ == 1 || total <= chunk) return job({0, total}, argument);
  const std::lock_guard<std::mutex> only(mutex_);
  const uint64_t count = uint64_t((total + chunk - 1) / chunk);
  phase_ = {job, argument, total, chunk};
  num_done_.store(0, std::memory_order_relaxed);
  tickets_.store(count << 32, std::memory_order_release);
  num_phases_.fetch_add(1, std::memory_order_release);
  num_phases_.notify_all();
  work();
  for (uint32_t done; (done = num_done_.load(std::memory_order_acquire)) != count;) await_change(num_done_, done);
}

// Takes chunks until none are left.
void Team::work() {
  for (;;) {
    uint64_t tickets = tickets_.load(std::memory_order_relaxed);
    if (next_chunk(tickets) >= num_chunks(tickets)) return;
    tickets = tickets_.fetch_add(1, std::memory_order_acq_rel);
    if (next_chunk(tickets) >= num_chunks(tickets)) return;
    const int64_t first = int64_t(next_chunk(tickets)) * phase_.chunk;
    phase_.job({first, std::min(first + phase_.chunk, phase_.total)}, phase_.argument);
    if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_chunks(tickets)) num_done_.notify_one();
  }
}

void Team::serve() {
  for (;;) {
    const uint32_t seen = num_phases_.load(std::memory_order_acquire);
    if (is_ending_.load(std::memory_order_relaxed)) return;
    work();
    await_change(num_phases_, seen);
  }
}

// Yields between looks: where the awaited thread has to run on this core, it can.
void Team::await_change(std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 1; i <= num_spins_; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
    if (i % kSpinsPerYield == 0) std::this_thread::yield();
  }
  word.wait(old, std::memory_order_acquire);
}

extern "C" {

Team* headrace_team_create(int num_threads, int spin_us, const int* cpus) {
  return new Team(num_threads, spin_us, cpus);
}

void headrace_team_destroy(Team* team) { delete team; }

}  // extern "C"
