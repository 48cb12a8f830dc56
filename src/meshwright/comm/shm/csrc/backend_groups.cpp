// What concerns a group as a whole: barriers, and smaller groups of it.
#include "backend.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace meshwright {

Ref<Work> ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(c10d::OpType::BARRIER, "shm:barrier", {}, {}, options.timeout, options.asyncOp,
                [this](const Terms& terms) { collectives_.barrier(terms); });
}

// A barrier that names who is missing; so does every barrier here, and all of them. The error begins with torch's own words
// for it, which have ranks of the group.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /* wait_all_ranks */) {
  const bool at_once = options.timeout == kNoTimeout;  // no time, in this call alone; elsewhere no limit of its own
  try {
    submit(c10d::OpType::BARRIER, "shm:monitored_barrier", {}, {}, at_once ? std::chrono::milliseconds(1) : options.timeout, false,
           [this](const Terms& terms) { collectives_.barrier(terms); });
  } catch (const LostPeer& lost) {
    const std::string own = "Rank " + std::to_string(rank_);
    throw LostPeer(
        (rank_ != 0 ? own + " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
         : at_once  ? own + " timed out in monitoredBarrier after 0 ms"
                    : "Rank " + std::to_string(lost.rank) + " failed to pass monitoredBarrier") + ": " + lost.what(),
        lost.rank, lost.is_known);
  }
}

// `ranks` are this group's. Python attaches to the new segment, and falls back to gloo, as for any new group.
Ref<c10d::Backend> ShmBackend::split(const Ref<c10d::Store>& store, const std::vector<int>& ranks, const Ref<Options>& options) {
  refuse_if_lost();
  std::vector<int64_t> global_ranks;
  for (const int rank : ranks) {
    TORCH_CHECK(rank >= 0 && rank < size_, "split: invalid rank: ", rank, " (rule: 0 to ", size_ - 1, ", in a group of ", size_, ")");
    global_ranks.push_back(waiter_.global_rank_of(rank));
  }
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  const auto timeout = options ? options->timeout : options_->timeout;
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("meshwright.comm.shm.backend")
      .attr("make_backend")(store, found - ranks.begin(), global_ranks, static_cast<double>(timeout.count()) / 1e3,
                            pybind11::arg("comes_within_timeout") = true)
      .cast<Ref<c10d::Backend>>();
}

}  // namespace meshwright
