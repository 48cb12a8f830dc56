// Parts of the caller's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

namespace meshwright {

struct Part {
  char* data;
  size_t bytes;
};
struct ConstPart {
  const char* data;
  size_t bytes;
};

// Several pieces that take part as one: their bytes count through from the first to the last.
class Pieces {
 public:
  explicit Pieces(std::vector<Part> parts) : parts_(std::move(parts)) {
    size_t end = 0;
    for (const Part& part : parts_) ends_.push_back(end += part.bytes);
  }
  size_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
  // Call `use(data, offset, bytes)` for what lies in [at, at + bytes): `offset` counts from `at`.
  template <class Use>
  void visit(size_t at, size_t bytes, Use use) const {
    size_t index = std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin();
    for (size_t offset = 0; offset < bytes; ++index) {
      const size_t begin = ends_[index] - parts_[index].bytes;
      const size_t now = std::min(bytes - offset, ends_[index] - (at + offset));
      if (now != 0) use(parts_[index].data + (at + offset - begin), offset, now);
      offset += now;
    }
  }
  void copy_out(char* target, size_t at, size_t bytes) const {
    visit(at, bytes, [&](const char* data, size_t offset, size_t now) { std::memcpy(target + offset, data, now); });
  }
  void copy_in(const char* source, size_t at, size_t bytes) const {
    visit(at, bytes, [&](char* data, size_t offset, size_t now) { std::memcpy(data, source + offset, now); });
  }

 private:
  std::vector<Part> parts_;
  std::vector<size_t> ends_;
};

}  // namespace meshwright
