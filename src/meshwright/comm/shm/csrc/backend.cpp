#include "backend.h"
#include "interpreter.h"

#include <chrono>
#include <map>
#include <tuple>

namespace meshwright {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Ranks with a core each: a peer is some microseconds away, a futex wake-up some tens. Ranks that share cores: the awaited
// rank needs this core, so it is yielded at once. Measured in benchmarks/transport.
constexpr Patience kRoomyCaller{100, microseconds(200)};
constexpr Patience kCrowdedCaller{0, microseconds(200)};
constexpr Patience kRoomyBackground{100, microseconds(0)};
constexpr Patience kCrowdedBackground{0, microseconds(0)};

// Every backend of this process. Never destroyed: torch may let go of a group after this library's own end.
using Backends = std::map<ShmBackend*, c10::weak_intrusive_ptr<ShmBackend>>;
struct All {
  std::mutex lock;
  Backends backends;
};
All& all() {
  static auto* const found = new All;
  return *found;
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<Segment> segment, const Settings& settings)
    : Backend(segment->rank(), segment->num_ranks()),
      segment_(std::move(segment)),
      options_(c10::make_intrusive<Options>("shm", milliseconds(settings.timeout_ms))),
      caller_(settings.crowded ? kCrowdedCaller : kRoomyCaller),
      background_(settings.crowded ? kCrowdedBackground : kRoomyBackground),
      waiter_(*segment_, settings.process_files, settings.global_ranks),
      collectives_(*segment_, waiter_),
      messages_(*segment_, waiter_),
      lane_(std::make_shared<Lane>(caller_, background_)),
      server_(std::make_shared<Server>()) {}

Ref<ShmBackend> ShmBackend::make(std::shared_ptr<Segment> segment, const Settings& settings) {
  auto made = c10::make_intrusive<ShmBackend>(std::move(segment), settings);
  std::lock_guard<std::mutex> held(all().lock);
  all().backends.emplace(made.get(), c10::weak_intrusive_ptr<ShmBackend>(made));
  return made;
}

ShmBackend::~ShmBackend() {
  release_resources();
  if (is_forked()) {
    // The parent's threads wait on these, for ever as far as this process can see; to destroy them would wait for that.
    new std::shared_ptr<Lane>(std::move(lane_));
    new std::shared_ptr<Server>(std::move(server_));
  }
}

void ShmBackend::release_resources() {
  {
    std::lock_guard<std::mutex> held(all().lock);
    all().backends.erase(this);
  }
  shutdown();
}

void ShmBackend::abort() {
  if (!is_forked()) fail(LostPeer("this rank has aborted the group", rank_));
}

void ShmBackend::shutdown() {
  if (is_forked()) return;  // the parent has not left
  if (left_.exchange(true)) return;
  const WithoutGil without_gil;
  waiter_.stop(kLeft, rank_);
  lane_->stop();
  std::thread ending;
  {
    std::lock_guard<std::mutex> held(server_->lock);
    server_->stopping = true;
    ending.swap(server_->thread);
  }
  server_->wanted.notify_all();
  join_or_detach(ending);
  messages_.abandon(LostPeer("this rank has left the group", rank_));
}

void ShmBackend::leave_all() {
  while (true) {
    Backends::node_type first;  // let go of without the lock, which the end of a backend takes
    {
      std::lock_guard<std::mutex> held(all().lock);
      if (all().backends.empty()) break;
      first = all().backends.extract(all().backends.begin());
    }
    // Another thread may let go of the group meanwhile: one whose last owner has gone leaves by itself.
    const Ref<ShmBackend> next = first.mapped().lock();
    if (next) next->shutdown();  // without the lock: callbacks run here
  }
  const WithoutGil without_gil;
  wait_for_detached();
}

void ShmBackend::tell_raised(uint64_t call) {
  std::lock_guard<std::mutex> held(all().lock);
  for (const auto& each : all().backends) each.first->waiter_.tell_raised(call);
}

c10::weak_intrusive_ptr<ShmBackend> ShmBackend::weak() {
  return c10::weak_intrusive_ptr<ShmBackend>(Ref<ShmBackend>::unsafe_reclaim_from_nonowning(this));
}

Deadline ShmBackend::deadline_after(milliseconds timeout) const {
  const milliseconds given = timeout == c10d::kUnsetTimeout || timeout == kNoTimeout ? options_->timeout : timeout;
  return {Clock::now() + given, given};
}

void ShmBackend::refuse_if_forked() const {
  if (is_forked()) {
    throw std::runtime_error("shm: a process that was forked from " + waiter_.name_of(rank_) + " cannot use its group");
  }
}

void ShmBackend::refuse_if_lost() const {
  refuse_if_forked();
  if (waiter_.stopping()) throw reason();
}

LostPeer ShmBackend::reason() const {
  std::lock_guard<std::mutex> held(failure_lock_);
  return failure_.value_or(LostPeer("shm: this rank has left the group", rank_));
}

LostPeer ShmBackend::fail(const LostPeer& error) {
  {
    std::lock_guard<std::mutex> held(failure_lock_);
    if (!failure_) failure_.emplace(error);
  }
  waiter_.stop(kFailed, error.known_rank());
  messages_.abandon(reason());
  return reason();
}

Ref<Work> ShmBackend::submit(c10d::OpType type, const char* title, const TensorList& inputs, TensorList outputs,
                             milliseconds timeout, bool async, Body body) {
  refuse_if_lost();
  auto work = c10::make_intrusive<ShmWork>(rank_, type, title, inputs, std::move(outputs));
  work->sequence_ = ++sequence_;
  work->body_ = [this, timeout, body = std::move(body)](Patience patience) {
    refuse_if_lost();
    try {
      body(Terms{patience, deadline_after(timeout)});
    } catch (const LostPeer& error) {
      throw fail(error);
    }
  };
  if (async) {
    work->help_ = [this, weak = weak(), raw = work.get()] {
      const auto alive = weak.lock();  // a callback may drop the group while this thread is in it
      if (!alive) return;              // it ended every work
      refuse_if_forked();
      lane_->help(*raw);
    };
    lane_->post(work);
  } else {
    lane_->run(work);
    if (const std::exception_ptr error = work->exception()) std::rethrow_exception(error);
  }
  return work;
}

Ref<Work> ShmBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) {
  check_one(tensors, "all_reduce");
  if (tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  c10d::AllreduceCoalescedOptions same;
  static_cast<c10d::AllreduceOptions&>(same) = options;
  return allreduce_coalesced(tensors, same);
}

// Tensors of one dtype travel as one, whatever memory each of them has.
Ref<Work> ShmBackend::allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  auto dense = make_dense(tensors, true);
  premultiply(dense, options.reduceOp);
  std::map<std::pair<Kind, Reduction>, std::vector<Part>> parts;
  for (const Dense& tensor : dense) {
    const std::pair key{elements_of(tensor.dense()).kind, reduction_of(options.reduceOp, tensor.dense())};
    parts[key].push_back(tensor.part());
  }
  std::vector<std::tuple<Kind, Reduction, Pieces>> batches;
  for (auto& [key, members] : parts) batches.emplace_back(key.first, key.second, Pieces(std::move(members)));
  return submit(c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, tensors, options.timeout, options.asyncOp,
                [this, dense = std::move(dense), batches = std::move(batches)](const Terms& terms) {
                  for (const auto& [kind, reduction, pieces] : batches) collectives_.all_reduce(pieces, kind, reduction, terms);
                  give_back(dense);
                });
}

Ref<Work> ShmBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& options) {
  check_one(tensors, "reduce");
  check_root("reduce", options.rootRank, options.rootTensor, size_);
  const Reduction reduction = reduction_of(options.reduceOp, tensors[0]);
  auto dense = make_dense(tensors, true);
  premultiply(dense, options.reduceOp);
  const int root = static_cast<int>(options.rootRank);
  return submit(c10d::OpType::REDUCE, "shm:reduce", tensors, tensors, options.timeout, options.asyncOp,
                [this, dense = std::move(dense), reduction, root](const Terms& terms) {
                  const Elements elements = elements_of(dense[0].dense());
                  collectives_.reduce(dense[0].data(), elements.count, elements.kind, reduction, root, terms);
                  if (rank_ == root) give_back(dense);
                });
}

Ref<Work> ShmBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  check_root("broadcast", options.rootRank, options.rootTensor, size_);
  const int root = static_cast<int>(options.rootRank);
  auto dense = make_dense(tensors, rank_ == root);
  return submit(c10d::OpType::BROADCAST, "shm:broadcast", tensors, tensors, options.timeout, options.asyncOp,
                [this, dense = std::move(dense), root](const Terms& terms) {
                  collectives_.broadcast(dense[0].part(), root, terms);
                  if (rank_ != root) give_back(dense);
                });
}

// inputs[i] of every rank arrive in parts[i], one tensor a rank; `outputs` are the tensors that the caller gave.
Ref<Work> ShmBackend::gather_all(TensorList outputs, std::vector<TensorList> parts, TensorList inputs, c10d::OpType type,
                                 const c10d::AllgatherOptions& options) {
  TORCH_CHECK(parts.size() == inputs.size(), "all_gather: ", inputs.size(), " inputs for ", parts.size(), " outputs");
  std::vector<std::vector<Dense>> targets;
  for (size_t i = 0; i < parts.size(); ++i) {
    const TensorList input{inputs[i]};
    TORCH_CHECK(static_cast<int>(parts[i].size()) == size_, "all_gather: ", parts[i].size(), " outputs for ", size_, " ranks");
    check_dtypes("all_gather", {&input, &parts[i]});
    targets.push_back(make_dense(parts[i], false));
  }
  auto sources = make_dense(inputs, true);
  return submit(type, "shm:all_gather", inputs, std::move(outputs), options.timeout, options.asyncOp,
                [this, targets = std::move(targets), sources = std::move(sources)](const Terms& terms) {
                  for (size_t i = 0; i < sources.size(); ++i) {
                    collectives_.all_gather(sources[i].const_part(), parts_of(targets[i]), terms);
                    give_back(targets[i]);
                  }
                });
}

Ref<Work> ShmBackend::allgather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  return gather_all(joined(outputs), outputs, inputs, c10d::OpType::ALLGATHER, options);
}

Ref<Work> ShmBackend::allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& options) {
  // Given as outputs[rank][i], where all_gather has outputs[i][rank].
  TORCH_CHECK(static_cast<int>(outputs.size()) == size_, "all_gather_coalesced: ", outputs.size(), " lists of outputs for ",
              size_, " ranks");
  std::vector<TensorList> parts(inputs.size());
  for (const TensorList& of_rank : outputs) {
    TORCH_CHECK(of_rank.size() == inputs.size(), "all_gather_coalesced: ", of_rank.size(), " outputs of a rank for ",
                inputs.size(), " inputs");
    for (size_t i = 0; i < inputs.size(); ++i) parts[i].push_back(of_rank[i]);
  }
  return gather_all(joined(outputs), std::move(parts), inputs, c10d::OpType::ALLGATHER_COALESCED, options);
}

Ref<Work> ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  TensorList outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

Ref<Work> ShmBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                      const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "all_gather: ", inputs.size(), " inputs for ", outputs.size(), " outputs");
  check_pairs("all_gather", inputs, outputs);
  auto targets = make_dense(outputs, false);
  auto sources = make_dense(inputs, true);
  for (size_t i = 0; i < sources.size(); ++i) {
    TORCH_CHECK(targets[i].bytes() == sources[i].bytes() * size_, "all_gather: an output of ", targets[i].bytes(),
                " bytes for ", size_, " inputs of ", sources[i].bytes());
  }
  return submit(c10d::OpType::_ALLGATHER_BASE, "shm:all_gather", inputs, outputs, options.timeout, options.asyncOp,
                [this, targets = std::move(targets), sources = std::move(sources)](const Terms& terms) {
                  for (size_t i = 0; i < sources.size(); ++i) {
                    std::vector<Part> parts;
                    const size_t bytes = sources[i].bytes();
                    for (int peer = 0; peer < size_; ++peer) parts.push_back({targets[i].data() + peer * bytes, bytes});
                    collectives_.all_gather(sources[i].const_part(), parts, terms);
                  }
                  give_back(targets);
                });
}

// outputs[i] receives the reduction of every rank's inputs[i][this rank].
Ref<Work> ShmBackend::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  check_one(outputs, "reduce_scatter");
  TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_, "reduce_scatter: it takes ", size_, " inputs");
  check_dtypes("reduce_scatter", {&inputs[0], &outputs});
  const Reduction reduction = reduction_of(options.reduceOp, outputs[0]);
  auto targets = make_dense(outputs, false);
  auto sources = make_dense(inputs[0], true);
  premultiply(sources, options.reduceOp);
  return submit(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", inputs[0], outputs, options.timeout, options.asyncOp,
                [this, targets = std::move(targets), sources = std::move(sources), reduction](const Terms& terms) {
                  collectives_.reduce_scatter(const_parts_of(sources), targets[0].part(), elements_of(targets[0].dense()).kind,
                                              reduction, terms);
                  give_back(targets);
                });
}

Ref<Work> ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  TensorList outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Ref<Work> ShmBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter: ", inputs.size(), " inputs for ", outputs.size(), " outputs");
  check_pairs("reduce_scatter", inputs, outputs);
  std::vector<Reduction> reductions;
  for (const at::Tensor& output : outputs) reductions.push_back(reduction_of(options.reduceOp, output));
  auto targets = make_dense(outputs, false);
  auto sources = make_dense(inputs, true);
  premultiply(sources, options.reduceOp);
  for (size_t i = 0; i < sources.size(); ++i) {
    TORCH_CHECK(sources[i].bytes() == targets[i].bytes() * size_, "reduce_scatter: an input of ", sources[i].bytes(),
                " bytes for ", size_, " outputs of ", targets[i].bytes());
  }
  return submit(c10d::OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter", inputs, outputs, options.timeout, options.asyncOp,
                [this, targets = std::move(targets), sources = std::move(sources),
                 reductions = std::move(reductions)](const Terms& terms) {
                  for (size_t i = 0; i < sources.size(); ++i) {
                    std::vector<ConstPart> parts;
                    const size_t bytes = targets[i].bytes();
                    for (int peer = 0; peer < size_; ++peer) parts.push_back({sources[i].data() + peer * bytes, bytes});
                    collectives_.reduce_scatter(parts, targets[i].part(), elements_of(targets[i].dense()).kind, reductions[i],
                                                terms);
                  }
                  give_back(targets);
                });
}

void ShmBackend::reduce_slices(const TensorList& tensors, const std::vector<int64_t>& ends) {
  TORCH_CHECK(!tensors.empty() && static_cast<int>(ends.size()) == size_, "reduce_slices: ", tensors.size(), " tensors and ",
              ends.size(), " ends for ", size_, " ranks");
  std::vector<Part> parts;
  const Kind kind = elements_of(tensors[0]).kind;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.is_contiguous() && elements_of(tensor).kind == kind, "reduce_slices: contiguous tensors of one dtype");
    TORCH_CHECK(tensor.numel() == 0 || tensor.data_ptr() != nullptr, "reduce_slices: a tensor of ", tensor.nbytes(),
                " bytes without memory, as FakeTensorMode makes them");
    parts.push_back({static_cast<char*>(tensor.data_ptr()), tensor.nbytes()});
  }
  std::vector<size_t> byte_ends;
  for (const int64_t end : ends) byte_ends.push_back(static_cast<size_t>(end) * size_of(kind));
  TORCH_CHECK(std::is_sorted(byte_ends.begin(), byte_ends.end()), "reduce_slices: ends that do not ascend: ", ends);
  const Pieces pieces(std::move(parts));
  submit(c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", tensors, tensors, c10d::kUnsetTimeout, false,
         [&](const Terms& terms) { collectives_.reduce_slices(pieces, byte_ends, kind, Reduction::kSum, terms); });
}

}  // namespace meshwright
