// Sums of sparse tensors, whose ranks have different numbers of entries.
#include "backend.h"

#include <ATen/ATen.h>

namespace meshwright {

namespace {

constexpr int64_t kMostDims = 64;  // torch's own limit

// What a rank says of its tensor before the entries travel.
struct SparseHead {
  int64_t sparse_dims, dense_dims, dtype, num_entries;
  int64_t sizes[kMostDims];

  bool fits(const SparseHead& other) const {
    return sparse_dims == other.sparse_dims && dense_dims == other.dense_dims && dtype == other.dtype &&
           std::equal(std::begin(sizes), std::end(sizes), std::begin(other.sizes));
  }
  at::IntArrayRef shape() const { return {sizes, static_cast<size_t>(sparse_dims + dense_dims)}; }
};

SparseHead head_of(const at::Tensor& tensor) {
  SparseHead head{tensor.sparse_dim(), tensor.dense_dim(), static_cast<int64_t>(tensor.scalar_type()), tensor._nnz(), {}};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), head.sizes);
  return head;
}

std::string describe(const SparseHead& head) {
  return c10::str(head.sparse_dims, " sparse and ", head.dense_dims, " dense dims of shape ", head.shape(), " and dtype ",
                  static_cast<at::ScalarType>(head.dtype));
}

Part part_of(const at::Tensor& tensor) { return {static_cast<char*>(tensor.data_ptr()), tensor.nbytes()}; }

}  // namespace

Ref<Work> ShmBackend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor target = tensors[0];
  TORCH_CHECK(target.device().is_cpu() && target.layout() == at::kSparse, "the shm backend exchanges CPU tensors");
  TORCH_CHECK(target.dim() <= kMostDims, "all_reduce: a sparse tensor of ", target.dim(), " dims (rule: at most ", kMostDims, ")");
  TORCH_CHECK(options.reduceOp.op_ == c10d::ReduceOp::SUM, "all_reduce: sparse tensors have a sum only");
  // torch gives a view as real numbers; its sum has other entries, which would not come to the tensor itself.
  TORCH_CHECK(!target.is_view() || !target._base().is_complex(),
              "all_reduce: a complex sparse tensor keeps its own entries (rule: sum its real and its imaginary part, a tensor each)");
  const at::NoGradGuard no_grad;
  const at::Tensor own = target.coalesce();
  return submit(c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, tensors, options.timeout, options.asyncOp,
                [this, target, own](const Terms& terms) { target.copy_(sum_sparse(own, terms)); });
}

// Every rank gathers all entries and adds them up in the order of the ranks, so that all have the same bits.
at::Tensor ShmBackend::sum_sparse(const at::Tensor& own, const Terms& terms) {
  SparseHead mine = head_of(own);
  std::vector<SparseHead> heads(size_);
  std::vector<Part> room;
  for (SparseHead& head : heads) room.push_back({reinterpret_cast<char*>(&head), sizeof head});
  collectives_.all_gather({reinterpret_cast<const char*>(&mine), sizeof mine}, room, terms);
  for (int peer = 1; peer < size_; ++peer) {
    if (!heads[peer].fits(heads[0])) {
      throw Mismatch("all_reduce: the ranks do not agree: " + waiter_.name_of(0) + " has a sparse tensor with " + describe(heads[0]) +
                     ", " + waiter_.name_of(peer) + " one with " + describe(heads[peer]));
    }
  }
  const at::Tensor indices = own.indices().contiguous(), values = own.values().contiguous();
  std::vector<at::Tensor> all_indices, all_values;
  std::vector<Part> index_parts, value_parts;
  for (const SparseHead& head : heads) {
    std::vector<int64_t> value_sizes{head.num_entries};
    for (const int64_t size : head.shape().slice(head.sparse_dims)) value_sizes.push_back(size);
    all_indices.push_back(at::empty({head.sparse_dims, head.num_entries}, indices.options()));
    all_values.push_back(at::empty(value_sizes, values.options()));
    index_parts.push_back(part_of(all_indices.back()));
    value_parts.push_back(part_of(all_values.back()));
  }
  const Part own_indices = part_of(indices), own_values = part_of(values);
  collectives_.all_gather({own_indices.data, own_indices.bytes}, index_parts, terms);
  collectives_.all_gather({own_values.data, own_values.bytes}, value_parts, terms);
  at::Tensor sum;
  for (int peer = 0; peer < size_; ++peer) {
    at::Tensor part = at::_sparse_coo_tensor_unsafe(all_indices[peer], all_values[peer], own.sizes());
    part._coalesced_(true);
    sum = sum.defined() ? sum.add(part).coalesce() : part;
  }
  return sum;
}

}  // namespace meshwright
