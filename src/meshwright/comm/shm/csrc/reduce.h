// Element-wise reduction of the ranks' parts, always from rank 0 upwards, so that every rank and every run gets the same bits.
#pragma once

#include <cstddef>

namespace meshwright {

enum class Kind : unsigned char { kFloat64, kFloat32, kFloat16, kBFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8, kBool };
enum class Reduction : unsigned char { kSum, kAverage, kProduct, kMin, kMax, kAnd, kOr, kXor };

constexpr const char* name_of(Kind kind) {
  constexpr const char* names[] = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"};
  return names[static_cast<int>(kind)];
}
constexpr const char* name_of(Reduction reduction) {
  constexpr const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  return names[static_cast<int>(reduction)];
}

size_t size_of(Kind kind);

// Throws where a dtype has no such reduction (a mean of integers, bits of floats).
void check_reduction(Kind kind, Reduction reduction);

// target[i] = parts[0][i] (+) parts[1][i] (+) ... for i < count, and the same to `copy` unless it is null. Half precision is
// accumulated in float32 and rounded once. `target` may be one of the parts; `copy` overlaps none.
void reduce(void* target, void* copy, const void* const* parts, int num_parts, size_t count, Kind kind, Reduction reduction);

}  // namespace meshwright
