// Sends and receives of the backend, and the thread that moves those which nobody waits for.
#include "backend.h"
#include "interpreter.h"

#include <c10/util/thread_name.h>

namespace meshwright {

Ref<Work> ShmBackend::send(TensorList& tensors, int target, int tag) {
  TORCH_CHECK(target != kAnySource, "send: invalid rank: ", target, " (rule: 0 to ", size_ - 1, ", in a group of ", size_, ")");
  return exchange(tensors, true, target, tag);
}

Ref<Work> ShmBackend::recv(TensorList& tensors, int source, int tag) {
  TORCH_CHECK(source != kAnySource, "recv: invalid rank: ", source, " (rule: 0 to ", size_ - 1, ", in a group of ", size_, ")");
  return exchange(tensors, false, source, tag);
}

Ref<Work> ShmBackend::recvAnysource(TensorList& tensors, int tag) { return exchange(tensors, false, kAnySource, tag); }

Ref<Work> ShmBackend::exchange(TensorList& tensors, bool is_send, int peer, int tag) {
  const char* name = is_send ? "send" : "recv";
  check_one(tensors, name);
  TORCH_CHECK(peer == kAnySource || (peer >= 0 && peer < size_), name, ": invalid rank: ", peer, " (rule: 0 to ", size_ - 1,
              ", in a group of ", size_, ")");
  TORCH_CHECK(tag >= 0, name, ": tag ", tag, " (rule: at least 0)");
  refuse_if_lost();
  auto dense = make_dense(tensors, is_send);
  const c10d::OpType type = is_send ? c10d::OpType::SEND : peer == kAnySource ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
  const char* title = is_send ? "shm:send" : peer == kAnySource ? "shm:recvAnySource" : "shm:recv";
  auto work = c10::make_intrusive<ShmWork>(rank_, type, title, tensors, tensors);
  work->sequence_ = ++sequence_;
  auto message = std::make_shared<Message>();
  message->is_send = is_send;
  message->peer = peer;
  message->tag = tag;
  message->data = dense[0].data();
  message->bytes = dense[0].bytes();
  message->deadline = deadline_after(c10d::kUnsetTimeout);
  message->on_end = [work, dense, is_send, raw = message.get()](const std::exception_ptr& error) {
    if (!is_send && !error) {
      const at::NoGradGuard no_grad;
      give_back(dense);
    }
    work->source_rank_ = raw->peer;
    work->complete(error);
  };
  work->help_ = [this, weak = weak(), message] {
    const auto alive = weak.lock();  // a callback may drop the group while this thread is in it
    if (!alive) return;              // it ended every message
    refuse_if_forked();
    {
      std::lock_guard<std::mutex> held(server_->lock);
      ++server_->num_helpers;
    }
    try {
      messages_.wait_for(*message, caller_);
    } catch (const LostPeer& error) {
      fail(error);
    }
    {
      std::lock_guard<std::mutex> held(server_->lock);
      --server_->num_helpers;
    }
    server_->wanted.notify_one();
  };
  messages_.post(message);
  if (waiter_.stopping()) messages_.abandon(reason());  // whoever ended it meanwhile may not have seen this one
  if (!message->ended.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> held(server_->lock);
    if (!server_->thread.joinable() && !server_->stopping) {
      server_->thread = std::thread([this, weak = weak()] { serve_messages(weak); });
    }
    server_->wanted.notify_one();
  }
  return work;
}

// A callback that runs here may drop the group's last reference: this thread holds one while it is in the group.
void ShmBackend::serve_messages(const c10::weak_intrusive_ptr<ShmBackend>& weak) {
  c10::setThreadName("mw_shm_messages");
  std::shared_ptr<Server> server;
  if (const auto alive = weak.lock()) server = alive->server_;
  while (server) {
    {
      std::unique_lock<std::mutex> held(server->lock);
      // `stopping` first: where it is set, the group may be gone.
      server->wanted.wait(held, [this, &server] {
        return server->stopping || (server->num_helpers == 0 && !waiter_.stopping() && !messages_.is_idle());
      });
      if (server->stopping) return;
    }
    const auto alive = weak.lock();
    if (!alive) return;
    try {
      messages_.nap();
    } catch (const LostPeer& error) {
      fail(error);
    }
  }
}

}  // namespace meshwright
