// The shared segment of one group of ranks: what lies where, and what each field promises.
//
// Memory ordering. Every word that one rank writes and another reads without a kernel call between them is a lock-free
// std::atomic, stored with release and loaded with acquire: what a rank wrote before it published is seen by whoever saw
// the publication. That is the C++ memory model, which g++ and clang map to plain moves on x86-64 and to stlr/ldar on
// aarch64; nothing here leans on x86's stronger order. The one place that needs more is going to sleep (see wait.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace meshwright {

constexpr uint64_t kMagic = 0x4d455348'53484d31;  // "MESHSHM1"
constexpr int kMaxRanks = 64;
constexpr size_t kLine = 64;    // a cache line on the platforms that are claimed
constexpr size_t kPage = 4096;

enum RankState : uint32_t { kAbsent = 0, kPresent = 1, kFailed = 2, kLeft = 3 };

// What a rank is about to do, so that its peers notice when they are about to do something else.
struct Signature {
  uint64_t what = 0;   // operation, dtype, reduction and root, a byte each
  uint64_t bytes = 0;  // of this rank's part

  bool operator==(const Signature& other) const { return what == other.what && bytes == other.bytes; }
};

// Written by its own rank, but for `bell`, which others ring. Two signatures, as there are two sets of buffers: the
// one of a round is overwritten two rounds later, when every rank has read it.
struct alignas(2 * kLine) RankLine {
  std::atomic<uint64_t> published{0};  // rounds whose data this rank has laid out
  Signature signatures[2];
  alignas(kLine) std::atomic<uint32_t> bell{0};      // futex word of this rank's sleepers
  std::atomic<uint32_t> sleepers{0};                 // its threads that sleep, or are about to
  std::atomic<uint32_t> state{kAbsent};
  std::atomic<int32_t> blames{-1};                   // with kFailed: the rank that it could not reach
  std::atomic<int32_t> pid{0};
  std::atomic<uint64_t> raised_in{0};                // the last call in which code of this rank raised; see wait.h
};

struct Header {
  uint64_t magic = 0;
  uint64_t nonce = 0;
  uint32_t num_ranks = 0;
  uint32_t reserved = 0;
  uint64_t slot_bytes = 0;
  uint64_t ring_bytes = 0;
  alignas(kLine) std::atomic<uint32_t> num_sleepers{0};  // over all ranks: zero lets a publisher skip the bells
};

// One direction of one pair: a ring of bytes with one writer and one reader.
struct Ring {
  alignas(kLine) std::atomic<uint64_t> written{0};
  alignas(kLine) std::atomic<uint64_t> read{0};
  alignas(kLine) char data[1];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "words shared between processes must be lock-free");

inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Where everything is, from three numbers that all ranks know.
struct Layout {
  int num_ranks;
  size_t slot_bytes;
  size_t ring_bytes;

  size_t lines_at() const { return kPage; }
  size_t slots_at() const { return kPage + round_up(num_ranks * sizeof(RankLine), kPage); }
  size_t rings_at() const { return slots_at() + static_cast<size_t>(num_ranks) * 2 * slot_bytes; }
  size_t ring_stride() const { return round_up(offsetof(Ring, data) + ring_bytes, kPage); }
  size_t total() const { return rings_at() + static_cast<size_t>(num_ranks) * num_ranks * ring_stride(); }
};

// A view of the mapped segment; owns the mapping, not the file.
class Segment {
 public:
  Segment(int file, int rank, int num_ranks, size_t slot_bytes, size_t ring_bytes, uint64_t nonce, bool create);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankLine& line(int rank) const { return reinterpret_cast<RankLine*>(base_ + layout_.lines_at())[rank]; }
  RankLine& mine() const { return line(rank_); }
  char* slot(int rank, uint64_t round) const {
    return base_ + layout_.slots_at() + (static_cast<size_t>(rank) * 2 + (round & 1)) * layout_.slot_bytes;
  }
  Ring& ring(int source, int target) const {
    const size_t index = static_cast<size_t>(source) * layout_.num_ranks + target;
    return *reinterpret_cast<Ring*>(base_ + layout_.rings_at() + index * layout_.ring_stride());
  }
  size_t slot_bytes() const { return layout_.slot_bytes; }
  size_t ring_bytes() const { return layout_.ring_bytes; }
  int rank() const { return rank_; }
  int num_ranks() const { return layout_.num_ranks; }

 private:
  Layout layout_;
  int rank_;
  char* base_ = nullptr;
};

}  // namespace meshwright
