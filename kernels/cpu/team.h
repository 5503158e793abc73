// Threads that work on what one of them hands out: our own pool, since the barriers of OpenMP either burn a core that
// somebody else needs or sleep at every phase. Contract of the whole: kernels/cpu/team.py.
//
// Why there are no barriers: on a machine with other work, a thread that is needed at each of the 200 phases of a
// step makes all of them wait for the scheduler. Here only the calling thread is needed. The others help while they run:
// whoever is held up takes nothing, and nobody waits for more than the piece of work that it holds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

struct Range {
  int64_t first, end;
};

class Team {
 public:
  // `cpus`: where each of the threads but the calling one runs, or null. A thread that waits spins for `spin_us`, then
  // sleeps.
  Team(int num_threads, int spin_us, const int* cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // body(Range) for all of 0 .. total - 1, in pieces of `chunk`, by this thread and any others that are free; returns
  // when all is done. Bodies must not call the team. Calls from several threads exclude each other.
  template <class Body>
  void each(int64_t total, int64_t chunk, const Body& body) {
    run(total, chunk, [](Range range, const void* argument) { (*static_cast<const Body*>(argument))(range); }, &body);
  }

  // As above, in about kChunksPerThread pieces for each thread.
  template <class Body>
  void each(int64_t total, const Body& body) {
    each(total, std::max<int64_t>(1, total / (kChunksPerThread * num_threads_)), body);
  }

  int num_threads() const { return num_threads_; }

 private:
  using Job = void (*)(Range, const void*);
  static constexpr int64_t kChunksPerThread = 8;

  // One call of `each`. It stays as it is as long as any of its chunks is taken and not done.
  struct Phase {
    Job job;
    const void* argument;
    int64_t total;
    int64_t chunk;
  };

  void run(int64_t total, int64_t chunk, Job job, const void* argument);
  void serve();
  void work();
  void await_change(std::atomic<uint32_t>& word, uint32_t old);

  const int num_threads_;
  int num_spins_;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
  Phase phase_{};
  // The number of chunks in the upper half, that of the next one in the lower: who adds 1 and finds a chunk there has
  // taken it, and needs to know nothing else of the phase.
  alignas(64) std::atomic<uint64_t> tickets_{0};
  alignas(64) std::atomic<uint32_t> num_phases_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};
  std::atomic<bool> is_ending_{false};
};
