#include "messages.h"

#include <algorithm>
#include <cstring>

namespace meshwright {

namespace {

struct Head {
  int32_t tag;
  uint32_t reserved;
  uint64_t bytes;
};

// Heads and messages begin on cache lines: copies from and to the ring are half as fast where each store crosses one.
constexpr size_t kHeadBytes = kLine;
static_assert(sizeof(Head) <= kHeadBytes);

// What the next `bytes` of a message take in the ring: the last piece of it fills its line.
size_t room_of(size_t bytes) { return round_up(bytes, kLine); }

// Published in pieces, so that the reader copies one while the writer lays out the next.
constexpr size_t kPieceBytes = 64 * 1024;

uint64_t key_of(int source, int32_t tag) { return static_cast<uint64_t>(source + 1) << 32 | static_cast<uint32_t>(tag); }

void write_ring(Ring& ring, size_t capacity, uint64_t at, const char* data, size_t bytes) {
  const size_t start = at % capacity, first = std::min(bytes, capacity - start);
  std::memcpy(ring.data + start, data, first);
  if (bytes > first) std::memcpy(ring.data, data + first, bytes - first);
}

void read_ring(const Ring& ring, size_t capacity, uint64_t at, char* data, size_t bytes) {
  const size_t start = at % capacity, first = std::min(bytes, capacity - start);
  std::memcpy(data, ring.data + start, first);
  if (bytes > first) std::memcpy(data + first, ring.data, bytes - first);
}

}  // namespace

Messages::Messages(Segment& segment, Waiter& waiter)
    : segment_(segment),
      waiter_(waiter),
      sends_(segment.num_ranks()),
      current_(segment.num_ranks()),
      num_receives_(segment.num_ranks() + 1),
      kept_(segment.num_ranks()) {}

void Messages::post(const MessageRef& message) {
  {
    std::unique_lock<std::mutex> held(lock_);
    if (message->is_send) {
      sends_[message->peer].push_back(message);
    } else if (!claim_kept(message)) {
      add_receive(message);
    }
    tell_ended(held);
  }
  progress();
}

bool Messages::progress() {
  std::unique_lock<std::mutex> held(lock_);
  bool any = false;
  for (int peer = 0; peer < segment_.num_ranks(); ++peer) {
    if (!sends_[peer].empty()) any |= push_all(peer);
    if (!receives_.empty() || current_[peer] != nullptr) any |= pull_all(peer);
  }
  tell_ended(held);
  return any;
}

void Messages::wait_for(const Message& message, Patience patience) {
  const auto is_missing = [&](int rank) { return needs(message, rank); };
  const auto is_ready = [&] {
    if (message.ended.load(std::memory_order_acquire)) return true;
    progress();
    return message.ended.load(std::memory_order_acquire);
  };
  waiter_.until(message.is_send ? "send" : "recv", is_ready, is_missing, patience, message.deadline);
}

void Messages::nap() {
  if (waiter_.sleep_unless([&] { return progress() || is_idle(); })) return;
  for (const MessageRef& message : open_messages()) {
    const auto is_missing = [&](int rank) { return needs(*message, rank); };
    try {
      waiter_.check(message->is_send ? "send" : "recv", is_missing, message->deadline);
    } catch (const LostPeer&) {
      progress();  // what a rank gave before it ended is still there
      if (!message->ended.load(std::memory_order_acquire)) throw;
    }
  }
}

bool Messages::is_idle() {
  std::lock_guard<std::mutex> held(lock_);
  return receives_.empty() && std::all_of(sends_.begin(), sends_.end(), [](const auto& sends) { return sends.empty(); }) &&
         std::all_of(current_.begin(), current_.end(), [](const auto& arrival) { return !arrival || !arrival->receiver; });
}

void Messages::abandon(const LostPeer& lost) {
  const std::exception_ptr error = std::make_exception_ptr(lost);
  std::unique_lock<std::mutex> held(lock_);
  for (auto& sends : sends_) {
    for (const MessageRef& message : sends) end(message, error);
    sends.clear();
  }
  for (const auto& [key, receives] : receives_) {
    for (const Receive& each : receives) end(each.message, error);
  }
  receives_.clear();
  std::fill(num_receives_.begin(), num_receives_.end(), 0);
  for (auto& arrival : current_) {
    if (arrival && arrival->receiver) {
      end(arrival->receiver, error);
      arrival.reset();
    }
  }
  tell_ended(held);
}

bool Messages::push_all(int target) {
  bool any = false;
  auto& sends = sends_[target];
  while (!sends.empty()) {
    const MessageRef message = sends.front();
    if (!push(target, *message)) break;
    any = true;
    if (message->announced && message->moved == message->bytes) {
      sends.pop_front();
      end(message, nullptr);
    }
  }
  return any;
}

// Put the next piece of a message into its ring; false where there is no room.
bool Messages::push(int target, Message& message) {
  Ring& ring = segment_.ring(segment_.rank(), target);
  const size_t capacity = segment_.ring_bytes();
  uint64_t written = ring.written.load(std::memory_order_relaxed);
  size_t room = capacity - (written - ring.read.load(std::memory_order_acquire));
  if (!message.announced) {
    if (room < kHeadBytes) return false;
    const Head head{message.tag, 0, message.bytes};
    write_ring(ring, capacity, written, reinterpret_cast<const char*>(&head), sizeof head);
    written += kHeadBytes;
    room -= kHeadBytes;
    message.announced = true;
  } else if (room == 0) {
    return false;
  }
  const size_t bytes = std::min({room, kPieceBytes, message.bytes - message.moved});
  write_ring(ring, capacity, written, message.data + message.moved, bytes);
  message.moved += bytes;
  ring.written.store(written + room_of(bytes), std::memory_order_release);
  waiter_.ring(target);
  return true;
}

bool Messages::pull_all(int source) {
  bool any = false;
  while (true) {
    if (current_[source] == nullptr && (!wants(source) || !take_head(source))) return any;
    any = true;
    if (!pull(source)) return any;
  }
}

// Read the head of the ring's next message and find who asked for it.
bool Messages::take_head(int source) {
  Ring& ring = segment_.ring(source, segment_.rank());
  const uint64_t at = ring.read.load(std::memory_order_relaxed);
  if (ring.written.load(std::memory_order_acquire) - at < kHeadBytes) return false;
  Head head;
  read_ring(ring, segment_.ring_bytes(), at, reinterpret_cast<char*>(&head), sizeof head);
  ring.read.store(at + kHeadBytes, std::memory_order_release);
  auto arrival = std::make_unique<Arrival>();
  arrival->tag = head.tag;
  arrival->bytes = head.bytes;
  if (const MessageRef receiver = find_receiver(source, head.tag)) {
    hand_over(receiver, source, *arrival);
  } else {
    arrival->kept = std::make_unique<char[]>(std::max<size_t>(1, head.bytes));
  }
  current_[source] = std::move(arrival);
  return true;
}

// Copy what the ring holds of the current message; false where more is to come and not there yet.
bool Messages::pull(int source) {
  Arrival& arrival = *current_[source];
  Ring& ring = segment_.ring(source, segment_.rank());
  while (arrival.moved < arrival.bytes) {
    const uint64_t at = ring.read.load(std::memory_order_relaxed);
    const size_t there = ring.written.load(std::memory_order_acquire) - at;
    const size_t bytes = std::min({there, kPieceBytes, arrival.bytes - arrival.moved});
    if (bytes == 0) return false;
    // A receive of another size has no room for this; the message is taken out and dropped.
    char* target = arrival.receiver ? (arrival.receiver->error ? nullptr : arrival.receiver->data) : arrival.kept.get();
    if (target != nullptr) read_ring(ring, segment_.ring_bytes(), at, target + arrival.moved, bytes);
    arrival.moved += bytes;
    ring.read.store(at + room_of(bytes), std::memory_order_release);
    waiter_.ring(source);
  }
  if (arrival.receiver) {
    end(arrival.receiver, arrival.receiver->error);
  } else {
    kept_[source][arrival.tag].push_back(std::move(current_[source]));
  }
  current_[source].reset();
  return true;
}

void Messages::add_receive(const MessageRef& message) {
  const int source = message->peer;
  receives_[key_of(source, message->tag)].push_back({num_posted_++, message});
  ++num_receives_[source == kAnySource ? segment_.num_ranks() : source];
}

// Of a receive from this source and one from any the one that was posted first.
MessageRef Messages::find_receiver(int source, int32_t tag) {
  auto found = receives_.find(key_of(source, tag));
  const auto any = receives_.find(key_of(kAnySource, tag));
  if (found == receives_.end() ||
      (any != receives_.end() && any->second.front().number < found->second.front().number)) {
    found = any;
  }
  if (found == receives_.end()) return nullptr;
  MessageRef message = std::move(found->second.front().message);
  --num_receives_[message->peer == kAnySource ? segment_.num_ranks() : static_cast<int>(message->peer)];
  found->second.pop_front();
  if (found->second.empty()) receives_.erase(found);
  return message;
}

// Give a new receive what already came for it: a whole message, or one that is still coming.
bool Messages::claim_kept(const MessageRef& receiver) {
  for (int source = 0; source < segment_.num_ranks(); ++source) {
    if (receiver->peer != kAnySource && receiver->peer != source) continue;
    auto& kept = kept_[source];
    const auto found = kept.find(receiver->tag);
    if (found != kept.end()) {
      hand_over(receiver, source, *found->second.front());
      found->second.pop_front();
      if (found->second.empty()) kept.erase(found);
      end(receiver, receiver->error);
      return true;
    }
    Arrival* coming = current_[source].get();
    if (coming != nullptr && !coming->receiver && coming->tag == receiver->tag) {
      hand_over(receiver, source, *coming);
      return true;
    }
  }
  return false;
}

void Messages::hand_over(const MessageRef& receiver, int source, Arrival& arrival) {
  receiver->peer = source;
  if (receiver->bytes != arrival.bytes) {
    receiver->error = std::make_exception_ptr(
        WrongLength("recv: " + waiter_.name_of(source) + " sent " + std::to_string(arrival.bytes) + " bytes with tag " +
                        std::to_string(arrival.tag) + ", the tensor to receive into has " + std::to_string(receiver->bytes),
                    arrival.bytes));
  } else if (arrival.moved != 0) {
    std::memcpy(receiver->data, arrival.kept.get(), arrival.moved);
  }
  arrival.kept.reset();
  arrival.receiver = receiver;
}

bool Messages::wants(int source) const {
  return num_receives_[source] != 0 || num_receives_.back() != 0;
}

bool Messages::needs(const Message& message, int rank) const {
  if (message.peer != kAnySource) return message.peer == rank;
  // A rank that has left was done; one of the others may still send. Only where none is left will nothing come.
  const auto has_left = [&](int peer) { return segment_.line(peer).state.load(std::memory_order_acquire) == kLeft; };
  if (!has_left(rank)) return true;
  for (int peer = 0; peer < segment_.num_ranks(); ++peer) {
    if (peer != segment_.rank() && !has_left(peer)) return false;
  }
  return true;
}

void Messages::end(const MessageRef& message, const std::exception_ptr& error) {
  message->error = error;
  ended_.push_back(message);
}

void Messages::tell_ended(std::unique_lock<std::mutex>& held) {
  if (ended_.empty()) return;
  std::vector<MessageRef> ended;
  ended.swap(ended_);
  held.unlock();
  for (const MessageRef& message : ended) {
    message->ended.store(true, std::memory_order_release);
    if (message->on_end) message->on_end(message->error);
    message->on_end = nullptr;  // it holds the tensor, and the work that holds this message
  }
  held.lock();
}

std::vector<MessageRef> Messages::open_messages() {
  std::lock_guard<std::mutex> held(lock_);
  std::vector<MessageRef> open;
  for (const auto& [key, receives] : receives_) {
    for (const Receive& each : receives) open.push_back(each.message);
  }
  for (const auto& sends : sends_) open.insert(open.end(), sends.begin(), sends.end());
  for (const auto& arrival : current_) {
    if (arrival && arrival->receiver) open.push_back(arrival->receiver);
  }
  return open;
}

}  // namespace meshwright
