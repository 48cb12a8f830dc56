// Waiting for peers: spin, then yield the core, then sleep in the kernel; and telling a slow peer from a dead one.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "segment.h"

namespace meshwright {

using Clock = std::chrono::steady_clock;

inline void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How long a thread keeps its core before it sleeps. A waiting caller has nothing else to do; a background thread would
// take the core from the computation beside it; where ranks outnumber cores, spinning keeps the awaited rank from running.
struct Patience {
  int spins;
  std::chrono::microseconds yielding;
};

struct Deadline {
  Clock::time_point at;
  std::chrono::milliseconds given;
};

// Raised where a peer is gone, left, failed or late; `rank` is the group rank to blame, where that is one: not of several late ones.
struct LostPeer : std::runtime_error {
  LostPeer(const std::string& text, int rank, bool is_known = true) : std::runtime_error(text), rank(rank), is_known(is_known) {}
  int known_rank() const { return is_known ? rank : -1; }
  int rank;
  bool is_known;
};

// What this process is in the middle of: a number that its peers have for the same call of theirs; 0 outside of any. Where
// the code of one rank raises in a call, peers that wait for it in that call need not wait on: it will not come.
void enter_call(uint64_t call, uint64_t outermost);

class Waiter {
 public:
  // `process_files`: a pidfd for each rank of the group, -1 for this one; owned from now on.
  Waiter(Segment& segment, std::vector<int> process_files, std::vector<int64_t> global_ranks);
  ~Waiter();

  // Return once `ready()`. `missing(rank)` tells whether the wait is for that rank.
  template <class Ready, class Missing>
  void until(const char* what, Ready ready, Missing missing, Patience patience, Deadline deadline) {
    for (int spin = 0; spin < patience.spins; ++spin) {
      if (ready()) return;
      relax_core();
    }
    const auto begin = Clock::now();
    while (Clock::now() - begin < patience.yielding) {
      sched_yield();
      if (ready()) return;
    }
    while (!sleep_unless(ready)) {
      if (ready()) return;
      const Trouble trouble = look_around(missing, deadline);
      // A rank may have ended right after it gave what this one waits for.
      if (trouble.kind != Trouble::kNone && !ready()) raise(what, trouble, deadline);
    }
  }

  // Sleep until the bell rings or a twentieth of a second has passed, unless `ready()`; returns `ready()`.
  //
  // A sleeper announces itself and then looks once more; a publisher publishes and then looks for sleepers. Each puts a
  // sequentially consistent fence between its write and its read, so at least one of the two sees the other: no wake-up
  // is lost. The futex compares the bell in the kernel, so a ring between look and sleep ends the sleep at once.
  template <class Ready>
  bool sleep_unless(Ready ready) {
    RankLine& mine = segment_.mine();
    const uint32_t seen = mine.bell.load(std::memory_order_acquire);
    mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
    segment_.header().num_sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool done = ready();
    if (!done && !stopping()) {
      sleep(mine.bell, seen);
      done = ready();
    }
    segment_.header().num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
    mine.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return done;
  }

  // After a publication: wake whoever sleeps. One load where nobody does.
  void ring_all() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (segment_.header().num_sleepers.load(std::memory_order_relaxed) != 0) ring_sleepers();
  }
  void ring(int rank) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (segment_.line(rank).sleepers.load(std::memory_order_relaxed) != 0) ring_one(rank);
  }

  // Every wait of this process over this group ends with an error from now on; peers learn of it.
  void stop(RankState state, int blamed);
  // Tell the peers that this rank has raised in a call. Exchanges that it has begun go on.
  void tell_raised(uint64_t call) { segment_.mine().raised_in.store(call, std::memory_order_release); }
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  std::string name_of(int rank) const;
  int64_t global_rank_of(int rank) const { return global_ranks_[rank]; }

  // Raise where a rank that `missing` names is gone, has left or failed, or the deadline has passed.
  template <class Missing>
  void check(const char* what, Missing missing, Deadline deadline) {
    const Trouble trouble = look_around(missing, deadline);
    if (trouble.kind != Trouble::kNone) raise(what, trouble, deadline);
  }

 private:
  struct Trouble {
    enum Kind { kNone, kStopped, kGone, kLeft, kFailed, kRaised, kLate } kind = kNone;
    std::vector<int> ranks;
  };

  template <class Missing>
  Trouble look_around(Missing missing, Deadline deadline) {
    if (stopping()) return {Trouble::kStopped, {}};
    std::vector<int> late;
    for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
      if (rank == segment_.rank() || !missing(rank)) continue;
      // What a rank said before it ended tells more than that it has ended: it may have lost another.
      const bool ended = has_ended(rank);
      const uint32_t state = segment_.line(rank).state.load(std::memory_order_acquire);
      if (state == kFailed) return {Trouble::kFailed, {rank}};
      if (state == kLeft) return {Trouble::kLeft, {rank}};
      if (ended) return {Trouble::kGone, {rank}};
      if (has_raised(rank)) return {Trouble::kRaised, {rank}};
      late.push_back(rank);
    }
    if (Clock::now() >= deadline.at) return {Trouble::kLate, late};
    return {};
  }

  [[noreturn]] void raise(const char* what, const Trouble& trouble, Deadline deadline);
  bool has_ended(int rank) const;
  bool has_raised(int rank);
  void ring_sleepers();
  void ring_one(int rank);
  static void sleep(std::atomic<uint32_t>& bell, uint32_t seen);

  Segment& segment_;
  std::vector<int> process_files_;
  std::vector<int64_t> global_ranks_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> seen_call_{0};  // in which a peer was seen to have raised
  std::atomic<int64_t> seen_at_{0};     // when
};

}  // namespace meshwright
