// Collectives in which each pair of ranks exchanges a part of its own: gather, scatter and all-to-all.
#include "backend.h"

namespace meshwright {

Ref<Work> ShmBackend::gather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& options) {
  check_one(inputs, "gather");
  check_root("gather", options.rootRank, 0, size_);
  const int root = static_cast<int>(options.rootRank);
  const TensorList given = rank_ == root ? joined(outputs) : TensorList{};
  check_dtypes("gather", {&inputs, &given});
  auto targets = make_dense(given, false);
  TORCH_CHECK(rank_ != root || static_cast<int>(targets.size()) == size_, "gather: ", targets.size(), " outputs for ", size_,
              " ranks");
  auto source = make_dense(inputs, true);
  for (const Dense& target : targets) {
    TORCH_CHECK(target.bytes() == source[0].bytes(), "gather: an output of ", target.bytes(), " bytes for an input of ",
                source[0].bytes());
  }
  return submit(c10d::OpType::GATHER, "shm:gather", inputs, joined(outputs), options.timeout, options.asyncOp,
                [this, targets = std::move(targets), source = std::move(source), root](const Terms& terms) {
                  collectives_.gather(source[0].const_part(), parts_of(targets), root, terms);
                  give_back(targets);
                });
}

Ref<Work> ShmBackend::scatter(TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ScatterOptions& options) {
  check_one(outputs, "scatter");
  check_root("scatter", options.rootRank, 0, size_);
  const int root = static_cast<int>(options.rootRank);
  const TensorList given = rank_ == root ? joined(inputs) : TensorList{};
  check_dtypes("scatter", {&given, &outputs});
  auto sources = make_dense(given, true);
  TORCH_CHECK(rank_ != root || static_cast<int>(sources.size()) == size_, "scatter: ", sources.size(), " inputs for ", size_,
              " ranks");
  auto target = make_dense(outputs, false);
  for (const Dense& source : sources) {
    TORCH_CHECK(source.bytes() == target[0].bytes(), "scatter: an input of ", source.bytes(), " bytes for an output of ",
                target[0].bytes());
  }
  return submit(c10d::OpType::SCATTER, "shm:scatter", given, outputs, options.timeout, options.asyncOp,
                [this, target = std::move(target), sources = std::move(sources), root](const Terms& terms) {
                  collectives_.scatter(const_parts_of(sources), target[0].part(), root, terms);
                  give_back(target);
                });
}

Ref<Work> ShmBackend::alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_, "all_to_all: it takes ",
              size_, " inputs and outputs");
  check_dtypes("all_to_all", {&inputs, &outputs});
  auto targets = make_dense(outputs, false);
  auto sources = make_dense(inputs, true);
  return submit(c10d::OpType::ALLTOALL, "shm:all_to_all", inputs, outputs, options.timeout, options.asyncOp,
                [this, targets = std::move(targets), sources = std::move(sources)](const Terms& terms) {
                  collectives_.all_to_all(const_parts_of(sources), parts_of(targets), terms);
                  give_back(targets);
                });
}

Ref<Work> ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  check_pairs("all_to_all", {input}, {output});
  auto targets = make_dense({output}, false);
  auto sources = make_dense({input}, true);
  auto outputs = cut(targets[0], output_splits, size_, "all_to_all");
  auto inputs = const_cut(sources[0], input_splits, size_, "all_to_all");
  return submit(c10d::OpType::ALLTOALL_BASE, "shm:all_to_all", {input}, {output}, options.timeout, options.asyncOp,
                [this, targets = std::move(targets), sources = std::move(sources), outputs = std::move(outputs),
                 inputs = std::move(inputs)](const Terms& terms) {
                  collectives_.all_to_all(inputs, outputs, terms);
                  give_back(targets);
                });
}

}  // namespace meshwright
