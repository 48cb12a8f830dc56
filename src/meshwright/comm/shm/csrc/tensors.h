// Between tensors and parts of memory: what is dense, how it is cut, what its elements are.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <initializer_list>
#include <vector>

#include "collectives.h"

namespace meshwright {

using TensorList = std::vector<at::Tensor>;

// The caller's tensor, and the dense memory that takes part in the exchange: the same where it is dense already.
class Dense {
 public:
  // `read`: its values are wanted, not only its room.
  explicit Dense(const at::Tensor& tensor, bool read = true);
  char* data() const { return static_cast<char*>(dense_.data_ptr()); }
  size_t bytes() const { return dense_.nbytes(); }
  const at::Tensor& dense() const { return dense_; }
  Part part() const { return {data(), bytes()}; }
  ConstPart const_part() const { return {data(), bytes()}; }
  void scale(const at::Tensor& factor);
  void give_back() const;  // to the caller's tensor, where that is another

 private:
  at::Tensor tensor_, dense_;
};

std::vector<Dense> make_dense(const TensorList& tensors, bool read);
void give_back(const std::vector<Dense>& tensors);
std::vector<Part> parts_of(const std::vector<Dense>& tensors);
std::vector<ConstPart> const_parts_of(const std::vector<Dense>& tensors);
// Equal or given shares of dim 0, one a rank.
std::vector<Part> cut(const Dense& tensor, const std::vector<int64_t>& splits, int size, const char* name);
std::vector<ConstPart> const_cut(const Dense& tensor, const std::vector<int64_t>& splits, int size, const char* name);

struct Elements {
  Kind kind;
  size_t count;
};

// Complex numbers count as pairs.
Elements elements_of(const at::Tensor& tensor);
// Throws where tensors of this dtype have no such reduction.
Reduction reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor);
// PREMUL_SUM: every rank's values are multiplied by its factor first.
void premultiply(std::vector<Dense>& tensors, const c10d::ReduceOp& op);
void check_one(const TensorList& tensors, const char* name);
// Throws where this rank's own tensors have several dtypes: sizes in bytes may agree all the same.
void check_dtypes(const char* name, std::initializer_list<const TensorList*> lists);
// The same for tensors i of both lists; tensors of other calls that travel with them may differ.
void check_pairs(const char* name, const TensorList& inputs, const TensorList& outputs);
// Throws where a group of this size has no such rank, or the call names another than the one tensor of its root.
void check_root(const char* name, int64_t root, int64_t root_tensor, int size);
TensorList joined(const std::vector<TensorList>& lists);

}  // namespace meshwright
