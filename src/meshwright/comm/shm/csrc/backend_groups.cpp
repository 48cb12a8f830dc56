// What concerns a group as a whole: barriers.
#include "backend.h"

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
        lost.rank);
  }
}

}  // namespace meshwright
