// Threads that run one function together, in phases: our own pool, since the barriers of OpenMP either burn a core
// that somebody else needs or sleep at every phase. Contract of the whole: kernels/cpu/team.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

class Team;

struct Range {
  int64_t first, end;
};

// One thread's view of a `Team::run`.
class Worker {
 public:
  int index() const { return index_; }
  int count() const;

  // The next pieces of this phase's `total`, at most `chunk` of them; false when none are left. Threads that are
  // held up take fewer. All threads of a phase must name the same total.
  bool take(int64_t total, int64_t chunk, Range& range);

  // As `take`, in about kChunksPerThread chunks for each thread.
  bool take(int64_t total, Range& range);

  // Ends a phase: what any thread wrote before it, all see after it.
  void barrier();

 private:
  friend class Team;
  Worker(Team& team, int index) : team_(team), index_(index) {}
  Team& team_;
  int index_;
};

class Team {
 public:
  // `cpus`: where each of the threads but the first runs, or null. A thread that waits spins for `spin_us`, then sleeps.
  Team(int num_threads, int spin_us, const int* cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // body(Worker&) on all threads, the calling one among them; returns when all have ended. Calls exclude each other.
  template <class Body>
  void run(Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run([](Worker& worker, void* argument) { (*static_cast<Plain*>(argument))(worker); }, &body);
  }

  int num_threads() const { return num_threads_; }

 private:
  friend class Worker;
  using Job = void (*)(Worker&, void*);

  void run(Job job, void* argument);
  void serve(int index);
  void arrive();
  void await_change(std::atomic<uint32_t>& word, uint32_t old);

  const int num_threads_;
  int num_spins_;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
  Job job_ = nullptr;  // null ends the threads
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> num_jobs_{0};
  alignas(64) std::atomic<uint32_t> num_phases_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<int64_t> taken_{0};
};
