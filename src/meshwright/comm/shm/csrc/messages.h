// Messages between two ranks: tags, any order, any size, through one ring of bytes a direction.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "segment.h"
#include "wait.h"

namespace meshwright {

constexpr int kAnySource = -1;

// What came under a tag has not the length of the tensor that was to receive it.
struct WrongLength : std::runtime_error {
  WrongLength(const std::string& text, size_t sent_bytes) : std::runtime_error(text), sent_bytes(sent_bytes) {}
  size_t sent_bytes;
};

// One send or receive.
struct Message {
  bool is_send;
  std::atomic<int> peer;  // the target of a send; the source of a receive, kAnySource until its message came
  int32_t tag;
  char* data;
  size_t bytes;
  Deadline deadline;
  std::function<void(const std::exception_ptr& error)> on_end;  // null where it went well; called without the lock
  size_t moved = 0;
  bool announced = false;  // a send whose head is in the ring
  std::exception_ptr error;
  std::atomic<bool> ended{false};
};

using MessageRef = std::shared_ptr<Message>;

// Every message of this rank over one group. Any thread may call; none keeps the lock while it waits.
//
// The reader of a ring takes messages in the order in which they were sent. One that nobody asked for yet is kept aside in
// this process's memory, so that a receive of a later tag is never blocked by an earlier one. A ring is only read while
// a receive from that rank is open: what nobody asks for stays in the ring and holds its sender back.
class Messages {
 public:
  Messages(Segment& segment, Waiter& waiter);

  void post(const MessageRef& message);
  // Move all that can be moved now; tells whether anything was.
  bool progress();
  // Wait for one message, moving the others meanwhile.
  void wait_for(const Message& message, Patience patience);
  // For a background thread: move what can be moved, then sleep until something may have changed; raises as `wait_for`.
  void nap();
  bool is_idle();
  // Every open message ends with this error.
  void abandon(const LostPeer& error);

 private:
  // A message on its way out of a ring.
  struct Arrival {
    int32_t tag = 0;
    size_t bytes = 0;
    size_t moved = 0;
    std::unique_ptr<char[]> kept;  // where nobody has asked for it yet
    MessageRef receiver;           // or who has
  };

  // A receive that waits for its message.
  struct Receive {
    uint64_t number;  // in the order of posting
    MessageRef message;
  };

  void add_receive(const MessageRef& message);
  bool push_all(int target);
  bool push(int target, Message& message);
  bool pull_all(int source);
  bool take_head(int source);
  bool pull(int source);
  MessageRef find_receiver(int source, int32_t tag);
  bool claim_kept(const MessageRef& receiver);
  void hand_over(const MessageRef& receiver, int source, Arrival& arrival);
  bool wants(int source) const;
  // Whether a message needs this rank, so that its loss is the message's.
  bool needs(const Message& message, int rank) const;
  void end(const MessageRef& message, const std::exception_ptr& error);
  void tell_ended(std::unique_lock<std::mutex>& held);
  std::vector<MessageRef> open_messages();

  Segment& segment_;
  Waiter& waiter_;
  std::mutex lock_;
  std::vector<std::deque<MessageRef>> sends_;              // by target, in order
  std::unordered_map<uint64_t, std::list<Receive>> receives_;  // by source and tag, in the order of posting
  std::vector<size_t> num_receives_;                       // by source, and last those from any source
  uint64_t num_posted_ = 0;
  std::vector<std::unique_ptr<Arrival>> current_;          // by source: the one at the ring's end
  // By source and tag: whole, unclaimed, in the order of sending.
  std::vector<std::unordered_map<int32_t, std::list<std::unique_ptr<Arrival>>>> kept_;
  std::vector<MessageRef> ended_;                          // to be told so once the lock is free
};

}  // namespace meshwright
