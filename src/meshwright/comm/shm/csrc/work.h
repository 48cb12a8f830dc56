// One exchange that torch.distributed was promised, and the lane in which a group's collectives run one after another.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "wait.h"

namespace meshwright {

class Lane;

// A thread that ends what it runs in itself cannot wait for its own end.
void join_or_detach(std::thread& thread);
// Until the threads that were detached have ended: what they run may need the interpreter.
void wait_for_detached();

class ShmWork : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs);

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override { return source_rank_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  void complete(std::exception_ptr error);
  // The two halves of that: waiters go on; then whoever asked for a future is called back, in this thread.
  void finish_body(std::exception_ptr error);
  void mark_future();
  bool has_future();

 protected:
  friend class Lane;
  friend class ShmBackend;

  std::vector<at::Tensor> outputs_;
  std::function<void(Patience)> body_;  // a collective: what it does
  std::function<void()> help_;          // what a waiting thread does until the work is complete
  int source_rank_ = -1;
  uint64_t sequence_ = 0;

 private:
  std::mutex future_lock_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_marked_ = false;
};

using WorkRef = c10::intrusive_ptr<ShmWork>;

// Collectives of one group, in the order of their issue. Whoever waits for one runs it, and all before it, itself: a
// blocking call never changes threads. What nobody waits for yet runs in the lane's own thread, started by the first such
// call. A future's callback may wait for a later exchange (torch's PowerSGD hook does): then another thread takes over.
// A callback may also destroy the group: the lane's threads keep it until they have left it.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  Lane(Patience caller, Patience background) : caller_(caller), background_(background) {}
  ~Lane() { stop(); }

  void run(const WorkRef& work);
  void post(const WorkRef& work);
  void help(ShmWork& work);
  // End the thread and what is left to run; the caller has made waiting impossible before.
  void stop();

 private:
  void execute_front(std::unique_lock<std::mutex>& held, Patience patience, bool is_server);
  void call_back(std::unique_lock<std::mutex>& held, WorkRef work, bool is_server);
  void end_queue(std::unique_lock<std::mutex>& held);
  void start_thread();
  void serve();

  const Patience caller_, background_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<WorkRef> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // more than one only where callbacks wait for exchanges
  int num_free_ = 0;                  // of these, the ones that no callback keeps
};

}  // namespace meshwright
