// The torch.distributed backend: tensors in, parts of memory out to Collectives and Messages.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives.h"
#include "messages.h"
#include "process.h"
#include "segment.h"
#include "tensors.h"
#include "wait.h"
#include "work.h"

namespace meshwright {

struct Settings {
  std::vector<int64_t> global_ranks;  // by group rank
  std::vector<int> process_files;     // pidfds by group rank, -1 for this one
  int64_t timeout_ms;
  bool crowded;  // the host's ranks outnumber its cores
};

using c10d::Work;
template <class T>
using Ref = c10::intrusive_ptr<T>;

class ShmBackend : public c10d::Backend {
 public:
  // A backend that `leave_all` and `tell_raised` reach; the constructor alone makes one that they do not.
  static Ref<ShmBackend> make(std::shared_ptr<Segment> segment, const Settings& settings);
  ShmBackend(std::shared_ptr<Segment> segment, const Settings& settings);
  ~ShmBackend() override;
  // The group's end comes with its last owner; works may still keep this object's memory.
  void release_resources() override;

  const std::string getBackendName() const override { return "shm"; }
  Ref<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  void shutdown() override;
  // Leave every group of this process that is still there.
  static void leave_all();
  // Tell the ranks of every group of this process that this one has raised in a call.
  static void tell_raised(uint64_t call);

  Ref<Work> allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) override;
  Ref<Work> allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Ref<Work> reduce(TensorList& tensors, const c10d::ReduceOptions& options) override;
  Ref<Work> broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) override;
  Ref<Work> allgather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::AllgatherOptions& options) override;
  Ref<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Ref<Work> allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                const c10d::AllgatherOptions& options) override;
  Ref<Work> allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                            const c10d::AllgatherOptions& options) override;
  Ref<Work> reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                           const c10d::ReduceScatterOptions& options) override;
  Ref<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Ref<Work> reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                            const c10d::ReduceScatterOptions& options) override;
  // Beyond torch's interface: sum this rank's slice of the tensors, joined end to end, in place. Ends in elements.
  void reduce_slices(const TensorList& tensors, const std::vector<int64_t>& ends);
  Ref<Work> gather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& options) override;
  Ref<Work> scatter(TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ScatterOptions& options) override;
  Ref<Work> alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& options) override;
  Ref<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  bool supportsSplitting() const override { return true; }
  Ref<Backend> split(const Ref<c10d::Store>& store, const std::vector<int>& ranks, const Ref<Options>& options) override;
  Ref<Work> barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  Ref<Work> send(TensorList& tensors, int target, int tag) override;
  Ref<Work> recv(TensorList& tensors, int source, int tag) override;
  Ref<Work> recvAnysource(TensorList& tensors, int tag) override;

 private:
  using Body = std::function<void(const Terms&)>;

  // Run a collective in the lane: at once where the caller waits anyway, else when its turn comes.
  // `inputs` are what a profiler shows, `outputs` what the work results in.
  Ref<Work> submit(c10d::OpType type, const char* title, const TensorList& inputs, TensorList outputs,
                   std::chrono::milliseconds timeout, bool async, Body body);
  Ref<Work> gather_all(TensorList outputs, std::vector<TensorList> parts, TensorList inputs, c10d::OpType type,
                       const c10d::AllgatherOptions& options);
  Ref<Work> scatter_sums(TensorList outputs, std::vector<TensorList> inputs, c10d::OpType type,
                         const c10d::ReduceScatterOptions& options);
  // The sum of sparse tensors, coalesced, as gloo has it.
  Ref<Work> allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& options);
  at::Tensor sum_sparse(const at::Tensor& own, const Terms& terms);
  Ref<Work> exchange(TensorList& tensors, bool is_send, int peer, int tag);
  // For what may outlive the group: works, and the threads that run callbacks, which may destroy it.
  c10::weak_intrusive_ptr<ShmBackend> weak();
  Deadline deadline_after(std::chrono::milliseconds timeout) const;
  // A forked child has this object, but none of its threads, and the rank's words in the segment are its parent's.
  bool is_forked() const { return num_forks() != forks_at_birth_; }
  void refuse_if_forked() const;
  void refuse_if_lost() const;
  LostPeer reason() const;
  // End everything; returns why the group is lost, which is the first reason that anybody gave.
  LostPeer fail(const LostPeer& error);
  void serve_messages(const c10::weak_intrusive_ptr<ShmBackend>& weak);

  std::shared_ptr<Segment> segment_;
  Ref<Options> options_;
  const Patience caller_, background_;
  const uint64_t forks_at_birth_ = num_forks();
  Waiter waiter_;
  Collectives collectives_;
  Messages messages_;
  std::shared_ptr<Lane> lane_;  // its threads hold it, too
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> left_{false};

  mutable std::mutex failure_lock_;
  std::optional<LostPeer> failure_;  // why the group is lost

  // The thread for messages that nobody waits for.
  struct Server {
    std::mutex lock;
    std::condition_variable wanted;
    std::thread thread;
    int num_helpers = 0;  // threads that wait for a message, and move all others meanwhile
    bool stopping = false;
  };
  std::shared_ptr<Server> server_;  // its thread holds it, too
};

}  // namespace meshwright
