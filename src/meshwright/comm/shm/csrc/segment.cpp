#include "segment.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace meshwright {

namespace {

std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

}  // namespace

Segment::Segment(int file, int rank, int num_ranks, size_t slot_bytes, size_t ring_bytes, uint64_t nonce, bool create)
    : layout_{num_ranks, slot_bytes, ring_bytes}, rank_(rank) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw std::runtime_error("a segment holds 1 to " + std::to_string(kMaxRanks) + " ranks, not " +
                             std::to_string(num_ranks));
  }
  struct stat status;
  if (!create && fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) != layout_.total()) {
    throw std::runtime_error("the segment has " + std::to_string(status.st_size) + " bytes, not " +
                             std::to_string(layout_.total()));
  }
  if (create && ftruncate(file, static_cast<off_t>(layout_.total())) != 0) {
    throw system_error("cannot size a shared segment of " + std::to_string(layout_.total()) + " bytes");
  }
  void* base = mmap(nullptr, layout_.total(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) {
    throw system_error("cannot map a shared segment of " + std::to_string(layout_.total()) + " bytes");
  }
  base_ = static_cast<char*>(base);
  if (create) {
    auto* header = new (base_) Header();
    header->nonce = nonce;
    header->num_ranks = static_cast<uint32_t>(num_ranks);
    header->slot_bytes = slot_bytes;
    header->ring_bytes = ring_bytes;
    for (int other = 0; other < num_ranks; ++other) {
      new (&line(other)) RankLine();
    }
    // The rings are all zeros, which is their empty state; to touch them would take memory that most groups never use.
    header->magic = kMagic;
  } else if (header().magic != kMagic || header().nonce != nonce) {
    munmap(base_, layout_.total());
    base_ = nullptr;
    throw std::runtime_error("the segment belongs to another group");
  }
  mine().pid.store(static_cast<int32_t>(getpid()), std::memory_order_relaxed);
  mine().state.store(kPresent, std::memory_order_release);
}

Segment::~Segment() {
  if (base_ != nullptr) {
    munmap(base_, layout_.total());
  }
}

}  // namespace meshwright
