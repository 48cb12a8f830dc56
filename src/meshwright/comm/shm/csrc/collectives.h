// Collectives on plain memory, as rounds over the segment's slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "pieces.h"
#include "reduce.h"
#include "segment.h"
#include "wait.h"

namespace meshwright {

enum class Operation : unsigned char {
  kAllReduce, kAllGather, kReduceScatter, kBroadcast, kReduce, kGather, kScatter, kAllToAll, kBarrier
};

// How a call may wait.
struct Terms {
  Patience patience;
  Deadline deadline;
};

// Ranks of one group are in different collectives, or in one with different sizes. All of them raise, and none is lost.
struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One thread at a time. Every rank of the group makes the same calls in the same order; where one does not, each raises.
//
// A round is: lay out what the peers need in this round's slot, publish, wait until all have published, take what is
// needed from their slots. A rank has two slots and alternates. That is enough: a rank that lays out round n + 2 has seen all
// publish round n + 1, and a rank publishes n + 1 only after it has taken all of n.
class Collectives {
 public:
  Collectives(Segment& segment, Waiter& waiter) : segment_(segment), waiter_(waiter) {}

  // In place; all pieces hold elements of one kind.
  void all_reduce(const Pieces& data, Kind kind, Reduction reduction, Terms terms);
  // outputs[r] receives rank r's input; all ranks know all sizes.
  void all_gather(ConstPart input, const std::vector<Part>& outputs, Terms terms);
  // inputs[r] goes to rank r; output receives the reduction of everybody's inputs[this rank].
  void reduce_scatter(const std::vector<ConstPart>& inputs, Part output, Kind kind, Reduction reduction, Terms terms);
  // In place: each rank's slice of `data`, which ends where `ends` says, is replaced by everybody's sum of it on that rank alone.
  void reduce_slices(const Pieces& data, const std::vector<size_t>& ends, Kind kind, Reduction reduction, Terms terms);
  void broadcast(Part data, int root, Terms terms);
  void reduce(char* data, size_t count, Kind kind, Reduction reduction, int root, Terms terms);
  void gather(ConstPart input, const std::vector<Part>& outputs, int root, Terms terms);   // outputs on the root alone
  void scatter(const std::vector<ConstPart>& inputs, Part output, int root, Terms terms);  // inputs on the root alone
  // Sizes may differ from pair to pair; both sides must name the same.
  void all_to_all(const std::vector<ConstPart>& inputs, const std::vector<Part>& outputs, Terms terms);
  void barrier(Terms terms);

 private:
  template <class Lay, class Take>
  void round(const char* name, Lay lay, Take take, const Terms& terms, const Signature* signature);
  void compare(const char* name, const Signature& signature, bool same_bytes);
  void all_reduce_flat(const Pieces& data, Kind kind, Reduction reduction, Terms terms, const Signature& signature);
  void all_reduce_sliced(const Pieces& data, Kind kind, Reduction reduction, Terms terms, const Signature& signature);

  int rank() const { return segment_.rank(); }
  int size() const { return segment_.num_ranks(); }

  Segment& segment_;
  Waiter& waiter_;
  uint64_t round_ = 0;
};

}  // namespace meshwright
