#include "work.h"

#include "process.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/thread_name.h>

#include <optional>
#include <utility>

namespace meshwright {

ShmWork::ShmWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs)
    : Work(rank, type, title, inputs), outputs_(std::move(outputs)) {}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    if (timeout == kNoTimeout && help_) {
      help_();
      // Another thread may have moved the data, and may still be giving it to the caller's tensor.
      std::unique_lock<std::mutex> held(mutex_);
      cv_.wait(held, [this] { return completed_; });
    } else {
      std::unique_lock<std::mutex> held(mutex_);
      if (!cv_.wait_for(held, timeout, [this] { return completed_; })) {
        throw LostPeer("wait over shared memory: timed out after " + std::to_string(timeout.count()) + " ms", -1);
      }
    }
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  {
    std::lock_guard<std::mutex> held(future_lock_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
  }
  if (isCompleted()) mark_future();
  return future_;
}

void ShmWork::complete(std::exception_ptr error) {
  finish_body(std::move(error));
  mark_future();
}

void ShmWork::finish_body(std::exception_ptr error) {
  body_ = nullptr;  // lets go of inputs; they may be the last reference
  finish(std::move(error));
}

bool ShmWork::has_future() {
  std::lock_guard<std::mutex> held(future_lock_);
  return static_cast<bool>(future_);
}

void ShmWork::mark_future() {
  {
    std::lock_guard<std::mutex> held(future_lock_);
    if (!future_ || future_marked_) return;
    future_marked_ = true;
  }
  // Without the lock: callbacks run here, and may ask for the future.
  if (const std::exception_ptr error = exception()) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

namespace {

// Threads that were detached and have not ended yet. Never destroyed: such a thread may outlive this library's own end.
struct Detached {
  std::mutex lock;
  std::condition_variable ended;
  int count = 0;
  uint64_t forks = 0;  // a forked child has none of them
};
Detached& all_detached() {
  static auto* const found = new Detached;
  return *found;
}

// Lives in a detached thread, and goes with it.
struct DetachedThread {
  DetachedThread() {
    std::lock_guard<std::mutex> held(all_detached().lock);
    if (std::exchange(all_detached().forks, num_forks()) != num_forks()) all_detached().count = 0;
    ++all_detached().count;
  }
  ~DetachedThread() {
    std::lock_guard<std::mutex> held(all_detached().lock);
    --all_detached().count;
    all_detached().ended.notify_all();
  }
};
thread_local std::optional<DetachedThread> this_thread_is_detached;

}  // namespace

void join_or_detach(std::thread& thread) {
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    this_thread_is_detached.emplace();
    thread.detach();
  } else {
    thread.join();
  }
}

void wait_for_detached() {
  std::unique_lock<std::mutex> held(all_detached().lock);
  if (all_detached().forks != num_forks()) return;
  // A detached thread that comes here, to end the process, does not wait for itself.
  const int own = this_thread_is_detached ? 1 : 0;
  all_detached().ended.wait(held, [own] { return all_detached().count <= own; });
}

void Lane::run(const WorkRef& work) {
  {
    std::lock_guard<std::mutex> held(lock_);
    queue_.push_back(work);
  }
  help(*work);
}

void Lane::post(const WorkRef& work) {
  {
    std::unique_lock<std::mutex> held(lock_);
    queue_.push_back(work);
    if (stopping_) return end_queue(held);
    if (num_free_ == 0) start_thread();
  }
  changed_.notify_all();
}

void Lane::help(ShmWork& work) {
  std::unique_lock<std::mutex> held(lock_);
  while (!work.isCompleted()) {
    if (!busy_ && !queue_.empty()) {
      execute_front(held, caller_, false);
    } else {
      changed_.wait(held);
    }
  }
}

void Lane::execute_front(std::unique_lock<std::mutex>& held, Patience patience, bool is_server) {
  WorkRef work = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  held.unlock();
  std::exception_ptr error;
  try {
    const at::NoGradGuard no_grad;
    work->body_(patience);
  } catch (...) {
    error = std::current_exception();
  }
  work->finish_body(error);
  held.lock();
  busy_ = false;
  changed_.notify_all();
  // The next exchange may begin from here on.
  call_back(held, std::move(work), is_server);
}

// Without the lock: callbacks run here, and the work's end may be that of the group, or of what the caller keeps in it.
void Lane::call_back(std::unique_lock<std::mutex>& held, WorkRef work, bool is_server) {
  const bool keeps_server = is_server && work->has_future();
  if (keeps_server && --num_free_ == 0 && !queue_.empty() && !stopping_) start_thread();
  held.unlock();
  work->mark_future();
  work.reset();
  held.lock();
  if (keeps_server) ++num_free_;
}

void Lane::start_thread() {
  ++num_free_;
  threads_.emplace_back([self = shared_from_this()] { self->serve(); });
}

void Lane::serve() {
  c10::setThreadName("mw_shm_lane");
  std::unique_lock<std::mutex> held(lock_);
  while (true) {
    changed_.wait(held, [this] { return stopping_ || (!busy_ && !queue_.empty()); });
    if (stopping_) return;
    execute_front(held, background_, true);
  }
}

void Lane::stop() {
  std::vector<std::thread> ending;  // of two callers each ends other threads, so that none waits for one that waits for it
  {
    std::lock_guard<std::mutex> held(lock_);
    stopping_ = true;
    ending.swap(threads_);
  }
  changed_.notify_all();
  for (std::thread& thread : ending) join_or_detach(thread);
  std::unique_lock<std::mutex> held(lock_);
  end_queue(held);
}

// Each ends with the error that the group has ended with.
void Lane::end_queue(std::unique_lock<std::mutex>& held) {
  while (!queue_.empty()) execute_front(held, background_, false);
}

}  // namespace meshwright
