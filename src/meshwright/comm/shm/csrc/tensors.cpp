#include "tensors.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <numeric>
#include <optional>

namespace meshwright {

Dense::Dense(const at::Tensor& tensor, bool read) : tensor_(tensor) {
  TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided,
              "the shm backend exchanges dense CPU tensors");
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "the shm backend exchanges materialized tensors; call resolve_conj()");
  dense_ = tensor.is_contiguous() ? tensor : read ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
}

void Dense::scale(const at::Tensor& factor) { dense_ = dense_.mul(factor).to(dense_.scalar_type()); }

void Dense::give_back() const {
  if (dense_.is_same(tensor_)) return;
  std::optional<c10::InferenceMode> inference;  // a tensor made there may be written there only, by whichever thread
  if (tensor_.is_inference()) inference.emplace();
  tensor_.copy_(dense_);
}

std::vector<Dense> make_dense(const TensorList& tensors, bool read) {
  std::vector<Dense> dense;
  dense.reserve(tensors.size());
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) dense.emplace_back(tensor, read);
  return dense;
}

std::vector<Part> parts_of(const std::vector<Dense>& tensors) {
  std::vector<Part> parts;
  for (const Dense& tensor : tensors) parts.push_back(tensor.part());
  return parts;
}

std::vector<ConstPart> const_parts_of(const std::vector<Dense>& tensors) {
  std::vector<ConstPart> parts;
  for (const Dense& tensor : tensors) parts.push_back(tensor.const_part());
  return parts;
}

namespace {

template <class P, class T>
std::vector<P> cut_as(const Dense& tensor, const std::vector<int64_t>& splits, int size, const char* name) {
  const int64_t rows = tensor.dense().dim() == 0 ? 1 : tensor.dense().size(0);
  const int64_t row_bytes = rows == 0 ? 0 : static_cast<int64_t>(tensor.bytes()) / rows;
  for (const int64_t split : splits) {
    TORCH_CHECK(split >= 0, name, ": a split of ", split, " rows in ", c10::str(splits), " (rule: at least 0)");
  }
  const int64_t given = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK(splits.empty() ? rows % size == 0 : static_cast<int>(splits.size()) == size && given == rows, name,
              ": dim 0 of ", rows, " rows cannot be split over ", size, " ranks as ",
              splits.empty() ? "equal shares" : c10::str(splits));
  std::vector<P> parts;
  T* at = tensor.data();
  for (int peer = 0; peer < size; ++peer) {
    const size_t bytes = static_cast<size_t>((splits.empty() ? rows / size : splits[peer]) * row_bytes);
    parts.push_back({at, bytes});
    at += bytes;
  }
  return parts;
}

}  // namespace

std::vector<Part> cut(const Dense& tensor, const std::vector<int64_t>& splits, int size, const char* name) {
  return cut_as<Part, char>(tensor, splits, size, name);
}

std::vector<ConstPart> const_cut(const Dense& tensor, const std::vector<int64_t>& splits, int size, const char* name) {
  return cut_as<ConstPart, const char>(tensor, splits, size, name);
}

Elements elements_of(const at::Tensor& tensor) {
  const auto count = static_cast<size_t>(tensor.numel());
  switch (tensor.scalar_type()) {
    case at::kDouble: return {Kind::kFloat64, count};
    case at::kFloat: return {Kind::kFloat32, count};
    case at::kHalf: return {Kind::kFloat16, count};
    case at::kBFloat16: return {Kind::kBFloat16, count};
    case at::kLong: return {Kind::kInt64, count};
    case at::kInt: return {Kind::kInt32, count};
    case at::kShort: return {Kind::kInt16, count};
    case at::kChar: return {Kind::kInt8, count};
    case at::kByte: return {Kind::kUInt8, count};
    case at::kBool: return {Kind::kBool, count};
    case at::kComplexFloat: return {Kind::kFloat32, 2 * count};
    case at::kComplexDouble: return {Kind::kFloat64, 2 * count};
    default: TORCH_CHECK(false, "the shm backend cannot reduce ", tensor.scalar_type(), " tensors");
  }
}

Reduction reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  Reduction reduction = Reduction::kSum;
  switch (op.op_) {
    case c10d::ReduceOp::SUM: case c10d::ReduceOp::PREMUL_SUM: reduction = Reduction::kSum; break;
    case c10d::ReduceOp::AVG: reduction = Reduction::kAverage; break;
    case c10d::ReduceOp::PRODUCT: reduction = Reduction::kProduct; break;
    case c10d::ReduceOp::MIN: reduction = Reduction::kMin; break;
    case c10d::ReduceOp::MAX: reduction = Reduction::kMax; break;
    case c10d::ReduceOp::BAND: reduction = Reduction::kAnd; break;
    case c10d::ReduceOp::BOR: reduction = Reduction::kOr; break;
    case c10d::ReduceOp::BXOR: reduction = Reduction::kXor; break;
    default: TORCH_CHECK(false, "the shm backend does not know this reduction");
  }
  TORCH_CHECK(!tensor.is_complex() || reduction <= Reduction::kAverage, "complex tensors have a sum and a mean only");
  check_reduction(elements_of(tensor).kind, reduction);
  return reduction;
}

void premultiply(std::vector<Dense>& tensors, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  // torch 2.11's name; a later one has it as another name of PreMulSumSupplement.
  const auto* given = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(given != nullptr, "PREMUL_SUM came without its factor");
  const at::NoGradGuard no_grad;
  const at::Tensor factor = given->tensor_factor.defined() ? given->tensor_factor : at::scalar_tensor(given->double_factor, at::kDouble);
  for (Dense& tensor : tensors) tensor.scale(factor);
}

void give_back(const std::vector<Dense>& tensors) {
  for (const Dense& tensor : tensors) tensor.give_back();
}

void check_one(const TensorList& tensors, const char* name) {
  TORCH_CHECK(tensors.size() == 1, name, " takes one tensor, not ", tensors.size());
}

void check_dtypes(const char* name, std::initializer_list<const TensorList*> lists) {
  const at::Tensor* first = nullptr;
  for (const TensorList* list : lists) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined()) continue;  // refused elsewhere
      if (first == nullptr) first = &tensor;
      TORCH_CHECK(tensor.scalar_type() == first->scalar_type(), name, ": tensors of ", first->scalar_type(), " and of ",
                  tensor.scalar_type(), " in one call (rule: inputs and outputs of one dtype)");
    }
  }
}

void check_pairs(const char* name, const TensorList& inputs, const TensorList& outputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(!inputs[i].defined() || !outputs[i].defined() || inputs[i].scalar_type() == outputs[i].scalar_type(), name,
                ": an input of ", inputs[i].scalar_type(), " for an output of ", outputs[i].scalar_type(),
                " (rule: inputs and outputs of one dtype)");
  }
}

void check_root(const char* name, int64_t root, int64_t root_tensor, int size) {
  TORCH_CHECK(root >= 0 && root < size, name, ": invalid root rank: ", root, " (rule: 0 to ", size - 1, ", in a group of ", size,
              ")");
  TORCH_CHECK(root_tensor == 0, name, ": invalid root tensor: ", root_tensor, " (rule: 0, since a rank gives one tensor)");
}

TensorList joined(const std::vector<TensorList>& lists) {
  TensorList all;
  for (const TensorList& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace meshwright
