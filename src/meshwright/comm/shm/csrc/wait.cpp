#include "wait.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <ctime>

namespace meshwright {

namespace {

constexpr long kNapNs = 50'000'000;  // how often a sleeper looks whether its peers live
constexpr int64_t kGraceNs = 150'000'000;  // for what a rank that has raised had begun to send

std::atomic<uint64_t> current_call{0};
std::atomic<uint64_t> outermost_call{0};  // a peer that has left it will not come to the current one

// "stopped" for a process under SIGSTOP, and so on; "" where it cannot be seen.
std::string state_of(int pid) {
  char path[64], state = 0;
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return "";
  const int found = std::fscanf(file, "%*d (%*[^)]) %c", &state);
  std::fclose(file);
  if (found != 1) return "";
  switch (state) {
    case 'T': case 't': return "stopped";
    case 'D': return "waiting for a device";
    case 'R': return "running";
    case 'S': return "asleep";
    default: return "";
  }
}

}  // namespace

void enter_call(uint64_t call, uint64_t outermost) {
  current_call.store(call, std::memory_order_relaxed);
  outermost_call.store(outermost, std::memory_order_relaxed);
}

Waiter::Waiter(Segment& segment, std::vector<int> process_files, std::vector<int64_t> global_ranks)
    : segment_(segment), process_files_(std::move(process_files)), global_ranks_(std::move(global_ranks)) {}

Waiter::~Waiter() {
  for (int file : process_files_) {
    if (file >= 0) close(file);
  }
}

std::string Waiter::name_of(int rank) const {
  return "rank " + std::to_string(global_ranks_[rank]) + " (process " +
         std::to_string(segment_.line(rank).pid.load(std::memory_order_relaxed)) + ")";
}

bool Waiter::has_ended(int rank) const {
  // A pidfd becomes readable when its process has ended, and can never mean another process.
  pollfd entry{process_files_[rank], POLLIN, 0};
  return entry.fd >= 0 && poll(&entry, 1, 0) > 0;
}

bool Waiter::has_raised(int rank) {
  const uint64_t call = segment_.line(rank).raised_in.load(std::memory_order_acquire);
  if (call == 0) return false;
  if (call != current_call.load(std::memory_order_relaxed) && call != outermost_call.load(std::memory_order_relaxed)) {
    return false;
  }
  const int64_t now = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  if (seen_call_.exchange(call, std::memory_order_relaxed) != call) seen_at_.store(now, std::memory_order_relaxed);
  return now - seen_at_.load(std::memory_order_relaxed) >= kGraceNs;
}

void Waiter::raise(const char* what, const Trouble& trouble, Deadline deadline) {
  std::string text = std::string(what) + " over shared memory: ";
  const int rank = trouble.ranks.empty() ? -1 : trouble.ranks.front();
  switch (trouble.kind) {
    case Trouble::kStopped:
      throw LostPeer(text + "this rank has left the group", segment_.rank());
    case Trouble::kGone:
      throw LostPeer(text + name_of(rank) + " is gone", rank);
    case Trouble::kRaised:
      throw LostPeer(text + name_of(rank) + " has raised an error and will not come", rank);
    case Trouble::kLeft:
      throw LostPeer(text + name_of(rank) + " has left the group", rank);
    case Trouble::kFailed: {
      const int blamed = segment_.line(rank).blames.load(std::memory_order_relaxed);
      const bool other = blamed >= 0 && blamed < segment_.num_ranks() && blamed != rank;
      throw LostPeer(text + name_of(rank) + " gave up" + (other ? ": it lost " + name_of(blamed) : ""), other ? blamed : rank,
                     blamed >= 0);
    }
    default: {
      std::string names;
      for (int late : trouble.ranks) {
        const std::string state = state_of(segment_.line(late).pid.load(std::memory_order_relaxed));
        names += (names.empty() ? "" : names.back() == ',' ? " " : ", ") + name_of(late) + (state.empty() ? "" : ", " + state + ",");
      }
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(deadline.given.count()) / 1e3);
      throw LostPeer(text + names + " did not come: timed out after " + seconds + " s, the timeout of this call", rank,
                     trouble.ranks.size() == 1);
    }
  }
}

void Waiter::stop(RankState state, int blamed) {
  if (!stopping_.exchange(true, std::memory_order_acq_rel)) {  // the first reason stays
    RankLine& mine = segment_.mine();
    mine.blames.store(blamed, std::memory_order_relaxed);
    mine.state.store(state, std::memory_order_release);
  }
  for (int rank = 0; rank < segment_.num_ranks(); ++rank) ring_one(rank);
}

void Waiter::ring_sleepers() {
  for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
    if (rank != segment_.rank() && segment_.line(rank).sleepers.load(std::memory_order_relaxed) != 0) ring_one(rank);
  }
}

void Waiter::ring_one(int rank) {
  std::atomic<uint32_t>& bell = segment_.line(rank).bell;
  bell.fetch_add(1, std::memory_order_acq_rel);
  // Not the private kind: the word is shared between processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Waiter::sleep(std::atomic<uint32_t>& bell, uint32_t seen) {
  const timespec limit{0, kNapNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace meshwright
