#include "reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace meshwright {

namespace {

constexpr size_t kBlock = 1024;  // accumulators that stay in the first-level cache

struct Sum { template <class T> static T of(T a, T b) { return static_cast<T>(a + b); } };
struct Product { template <class T> static T of(T a, T b) { return static_cast<T>(a * b); } };
// A NaN wins, as in torch.minimum and torch.maximum.
struct Min { template <class T> static T of(T a, T b) { return (a < b || a != a) ? a : b; } };
struct Max { template <class T> static T of(T a, T b) { return (a > b || a != a) ? a : b; } };
struct And { template <class T> static T of(T a, T b) { return static_cast<T>(a & b); } };
struct Or { template <class T> static T of(T a, T b) { return static_cast<T>(a | b); } };
struct Xor { template <class T> static T of(T a, T b) { return static_cast<T>(a ^ b); } };

// What a dtype is added up in. Signed integers wrap around as torch's do: the build says -fwrapv.
template <class T> struct Accumulator { using type = T; };
template <> struct Accumulator<c10::Half> { using type = float; };
template <> struct Accumulator<c10::BFloat16> { using type = float; };

// No loop carries anything from one element to another, even where the target is one of the parts.
#define MESHWRIGHT_INDEPENDENT _Pragma("GCC ivdep")

template <class T, class Op, bool kMean>
void reduce_two(T* target, T* copy, const T* first, const T* second, size_t count, int num_parts) {
  using A = typename Accumulator<T>::type;
  const auto one = [&](size_t i) {
    A sum = Op::of(static_cast<A>(first[i]), static_cast<A>(second[i]));
    if constexpr (kMean) sum = sum / static_cast<A>(num_parts);
    return static_cast<T>(sum);
  };
  if (copy == nullptr) {
    MESHWRIGHT_INDEPENDENT
    for (size_t i = 0; i < count; ++i) target[i] = one(i);
  } else {
    MESHWRIGHT_INDEPENDENT
    for (size_t i = 0; i < count; ++i) target[i] = copy[i] = one(i);
  }
}

template <class T, class Op, bool kMean>
void reduce_many(T* target, T* copy, const T* const* parts, int num_parts, size_t count) {
  using A = typename Accumulator<T>::type;
  A sums[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    MESHWRIGHT_INDEPENDENT
    for (size_t i = 0; i < n; ++i) sums[i] = static_cast<A>(parts[0][at + i]);
    for (int part = 1; part < num_parts; ++part) {
      const T* values = parts[part] + at;
      MESHWRIGHT_INDEPENDENT
      for (size_t i = 0; i < n; ++i) sums[i] = Op::of(sums[i], static_cast<A>(values[i]));
    }
    if constexpr (kMean) {
      MESHWRIGHT_INDEPENDENT
      for (size_t i = 0; i < n; ++i) sums[i] = sums[i] / static_cast<A>(num_parts);
    }
    MESHWRIGHT_INDEPENDENT
    for (size_t i = 0; i < n; ++i) target[at + i] = static_cast<T>(sums[i]);
    if (copy != nullptr) std::memcpy(copy + at, target + at, n * sizeof(T));
  }
}

template <class T, class Op, bool kMean = false>
void run(void* target, void* copy, const void* const* parts, int num_parts, size_t count) {
  const T* const* typed = reinterpret_cast<const T* const*>(parts);
  if (num_parts == 2) {
    reduce_two<T, Op, kMean>(static_cast<T*>(target), static_cast<T*>(copy), typed[0], typed[1], count, num_parts);
  } else {
    reduce_many<T, Op, kMean>(static_cast<T*>(target), static_cast<T*>(copy), typed, num_parts, count);
  }
}

template <class T>
void run_float(void* target, void* copy, const void* const* parts, int num_parts, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return run<T, Sum>(target, copy, parts, num_parts, count);
    case Reduction::kAverage: return run<T, Sum, true>(target, copy, parts, num_parts, count);
    case Reduction::kProduct: return run<T, Product>(target, copy, parts, num_parts, count);
    case Reduction::kMin: return run<T, Min>(target, copy, parts, num_parts, count);
    default: return run<T, Max>(target, copy, parts, num_parts, count);
  }
}

template <class T>
void run_integer(void* target, void* copy, const void* const* parts, int num_parts, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return run<T, Sum>(target, copy, parts, num_parts, count);
    case Reduction::kProduct: return run<T, Product>(target, copy, parts, num_parts, count);
    case Reduction::kMin: return run<T, Min>(target, copy, parts, num_parts, count);
    case Reduction::kMax: return run<T, Max>(target, copy, parts, num_parts, count);
    case Reduction::kAnd: return run<T, And>(target, copy, parts, num_parts, count);
    case Reduction::kOr: return run<T, Or>(target, copy, parts, num_parts, count);
    default: return run<T, Xor>(target, copy, parts, num_parts, count);
  }
}

// A sum of truth values is "any", a product "all".
void run_bool(void* target, void* copy, const void* const* parts, int num_parts, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: case Reduction::kMax: case Reduction::kOr:
      return run<uint8_t, Or>(target, copy, parts, num_parts, count);
    case Reduction::kXor: return run<uint8_t, Xor>(target, copy, parts, num_parts, count);
    default: return run<uint8_t, And>(target, copy, parts, num_parts, count);
  }
}

}  // namespace

size_t size_of(Kind kind) {
  switch (kind) {
    case Kind::kFloat64: case Kind::kInt64: return 8;
    case Kind::kFloat32: case Kind::kInt32: return 4;
    case Kind::kFloat16: case Kind::kBFloat16: case Kind::kInt16: return 2;
    default: return 1;
  }
}

void check_reduction(Kind kind, Reduction reduction) {
  const bool floating = kind <= Kind::kBFloat16;
  if ((!floating && reduction == Reduction::kAverage) || (floating && reduction >= Reduction::kAnd)) {
    throw std::runtime_error(std::string("there is no ") + name_of(reduction) + " of " + name_of(kind) + " tensors");
  }
}

void reduce(void* target, void* copy, const void* const* parts, int num_parts, size_t count, Kind kind, Reduction reduction) {
  switch (kind) {
    case Kind::kFloat64: return run_float<double>(target, copy, parts, num_parts, count, reduction);
    case Kind::kFloat32: return run_float<float>(target, copy, parts, num_parts, count, reduction);
    case Kind::kFloat16: return run_float<c10::Half>(target, copy, parts, num_parts, count, reduction);
    case Kind::kBFloat16: return run_float<c10::BFloat16>(target, copy, parts, num_parts, count, reduction);
    case Kind::kInt64: return run_integer<int64_t>(target, copy, parts, num_parts, count, reduction);
    case Kind::kInt32: return run_integer<int32_t>(target, copy, parts, num_parts, count, reduction);
    case Kind::kInt16: return run_integer<int16_t>(target, copy, parts, num_parts, count, reduction);
    case Kind::kInt8: return run_integer<int8_t>(target, copy, parts, num_parts, count, reduction);
    case Kind::kUInt8: return run_integer<uint8_t>(target, copy, parts, num_parts, count, reduction);
    case Kind::kBool: return run_bool(target, copy, parts, num_parts, count, reduction);
  }
}

}  // namespace meshwright
