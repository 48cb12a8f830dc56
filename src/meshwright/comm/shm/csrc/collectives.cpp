#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace meshwright {

namespace {

// Below it one round of more work beats two of less. Two ranks read and write as much either way, so that one round wins until
// what it saves is lost in the copies.
constexpr size_t kFlatBytes = 16 * 1024, kFlatBytesOfTwo = 128 * 1024;

const char* name_of(Operation operation) {
  constexpr const char* names[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                   "gather",     "scatter",    "all_to_all",     "barrier"};
  return names[static_cast<int>(operation)];
}

Signature sign(Operation operation, size_t bytes, int root = 0, Kind kind = Kind::kUInt8,
               Reduction reduction = Reduction::kSum) {
  const auto byte = [](auto value, int at) { return static_cast<uint64_t>(value) << (8 * at); };
  return {byte(operation, 0) | byte(kind, 1) | byte(reduction, 2) | byte(root, 3), bytes};
}

// The sizes that a rank expects of all parts, in the upper half of its signature. `fits` is whether its own tensors agree with
// them: where they do not, the signature equals nobody's, so that every rank raises and none waits for this one.
template <class P>
void add_sizes(Signature& signature, const std::vector<P>& parts, bool fits, int rank) {
  uint32_t sum = 2166136261u;  // FNV-1a
  for (const P& part : parts) sum = (sum ^ static_cast<uint32_t>(part.bytes ^ part.bytes >> 32)) * 16777619u;
  signature.what |= static_cast<uint64_t>(fits ? sum : ~sum ^ static_cast<uint32_t>(rank)) << 32;
}

std::string describe(const Signature& signature) {
  const auto operation = static_cast<Operation>(signature.what & 0xff);
  std::string text = name_of(operation);
  if (operation == Operation::kBarrier) return text;
  text += " of " + std::to_string(signature.bytes) + " bytes";
  if (operation == Operation::kAllReduce || operation == Operation::kReduceScatter || operation == Operation::kReduce) {
    text += std::string(" (") + name_of(static_cast<Reduction>(signature.what >> 16 & 0xff)) + " of " +
            name_of(static_cast<Kind>(signature.what >> 8 & 0xff)) + ")";
  }
  if (operation >= Operation::kBroadcast && operation <= Operation::kScatter) {
    if (operation != Operation::kReduceScatter) text += ", root " + std::to_string(signature.what >> 24 & 0xff);
  }
  return text;
}

void copy(char* target, const char* source, size_t bytes) {
  if (bytes != 0) std::memcpy(target, source, bytes);
}

// The part of [at, at + most) that lies below `end`.
size_t span(size_t end, size_t at, size_t most) { return at >= end ? 0 : std::min(most, end - at); }

size_t num_rounds(size_t bytes, size_t each) { return std::max<size_t>(1, (bytes + each - 1) / each); }

}  // namespace

template <class Lay, class Take>
void Collectives::round(const char* name, Lay lay, Take take, const Terms& terms, const Signature* signature) {
  const uint64_t number = round_ + 1;
  lay(number);
  RankLine& mine = segment_.mine();
  if (signature != nullptr) mine.signatures[number & 1] = *signature;
  mine.published.store(number, std::memory_order_release);
  waiter_.ring_all();
  const auto is_missing = [&](int peer) {
    return segment_.line(peer).published.load(std::memory_order_acquire) < number;
  };
  int seen = 0;
  const auto all_here = [&] {
    while (seen < size() && !is_missing(seen)) ++seen;
    return seen == size();
  };
  waiter_.until(name, all_here, is_missing, terms.patience, terms.deadline);
  round_ = number;
  take(number);
}

void Collectives::compare(const char* name, const Signature& signature, bool same_bytes) {
  for (int peer = 0; peer < size(); ++peer) {
    Signature other = segment_.line(peer).signatures[round_ & 1];
    const std::string told = describe(other);
    if (!same_bytes) other.bytes = signature.bytes;
    if (!(other == signature)) {
      const bool sizes_alone = (other.what ^ signature.what) << 32 == 0 && other.bytes == signature.bytes;
      throw Mismatch(std::string(name) + ": the ranks do not agree: " + waiter_.name_of(rank()) + " is in " +
                     describe(signature) + ", " + waiter_.name_of(peer) + " in " + told +
                     (sizes_alone ? "; the sizes that they give for the parts of all ranks differ, or a rank's own tensors differ "
                                    "from those that it gives"
                                  : ""));
    }
  }
}

void Collectives::all_reduce(const Pieces& data, Kind kind, Reduction reduction, Terms terms) {
  const Signature signature = sign(Operation::kAllReduce, data.bytes(), 0, kind, reduction);
  if (data.bytes() <= std::min(size() == 2 ? kFlatBytesOfTwo : kFlatBytes, segment_.slot_bytes())) {
    all_reduce_flat(data, kind, reduction, terms, signature);
  } else {
    all_reduce_sliced(data, kind, reduction, terms, signature);
  }
}

void Collectives::all_reduce_flat(const Pieces& data, Kind kind, Reduction reduction, Terms terms,
                                  const Signature& signature) {
  round(
      "all_reduce", [&](uint64_t n) { data.copy_out(segment_.slot(rank(), n), 0, data.bytes()); },
      [&](uint64_t n) {
        compare("all_reduce", signature, true);
        data.visit(0, data.bytes(), [&](char* own, size_t offset, size_t bytes) {
          const void* parts[kMaxRanks];
          for (int peer = 0; peer < size(); ++peer) parts[peer] = segment_.slot(peer, n) + offset;
          meshwright::reduce(own, nullptr, parts, size(), bytes / size_of(kind), kind, reduction);
        });
      },
      terms, &signature);
}

// A slot holds `size` pieces. Piece d of rank r's slot carries r's values of slice d, for rank d to add up; r's own piece is
// free and carries the finished slice r of the chunk before. So each round adds up one chunk and hands out the last one.
void Collectives::all_reduce_sliced(const Pieces& data, Kind kind, Reduction reduction, Terms terms,
                                    const Signature& signature) {
  const size_t piece = segment_.slot_bytes() / size() / kLine * kLine;
  // Chunks of one size, their slices in whole cache lines.
  const size_t num_chunks = num_rounds(data.bytes(), piece * size());
  const size_t even = (data.bytes() + num_chunks - 1) / num_chunks;
  const size_t slice = std::min(piece, round_up((even + size() - 1) / size(), kLine));
  const size_t steps = num_rounds(data.bytes(), slice * size());
  for (size_t step = 0; step <= steps; ++step) {
    const auto at = [&](size_t index, int owner) { return (index * size() + owner) * slice; };
    const auto bytes_of = [&](size_t index, int owner) { return span(data.bytes(), at(index, owner), slice); };
    round(
        "all_reduce",
        [&](uint64_t n) {
          if (step == steps) return;
          for (int next = 1; next < size(); ++next) {
            const int owner = (rank() + next) % size();
            data.copy_out(segment_.slot(rank(), n) + owner * piece, at(step, owner), bytes_of(step, owner));
          }
        },
        [&](uint64_t n) {
          if (step == 0) compare("all_reduce", signature, true);
          if (step > 0) {
            for (int next = 1; next < size(); ++next) {
              const int owner = (rank() + next) % size();
              data.copy_in(segment_.slot(owner, n) + owner * piece, at(step - 1, owner), bytes_of(step - 1, owner));
            }
          }
          if (step == steps) return;
          // Into the next round's slot: nobody reads it any more, see the class.
          char* result = segment_.slot(rank(), n + 1) + rank() * piece;
          data.visit(at(step, rank()), bytes_of(step, rank()), [&](char* own, size_t offset, size_t bytes) {
            const void* parts[kMaxRanks];
            for (int peer = 0; peer < size(); ++peer) parts[peer] = segment_.slot(peer, n) + rank() * piece + offset;
            parts[rank()] = own;
            meshwright::reduce(own, result + offset, parts, size(), bytes / size_of(kind), kind, reduction);
          });
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::all_gather(ConstPart input, const std::vector<Part>& outputs, Terms terms) {
  const bool fits = outputs[rank()].bytes == input.bytes;
  Signature signature = sign(Operation::kAllGather, input.bytes);
  add_sizes(signature, outputs, fits, rank());
  const size_t each = segment_.slot_bytes();
  size_t longest = input.bytes;
  for (const Part& output : outputs) longest = std::max(longest, output.bytes);
  if (fits && outputs[rank()].data != input.data) {
    copy(outputs[rank()].data, input.data, input.bytes);
  }
  const size_t steps = num_rounds(longest, each);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * each;
    round(
        "all_gather",
        [&](uint64_t n) { copy(segment_.slot(rank(), n), input.data + at, span(input.bytes, at, each)); },
        [&](uint64_t n) {
          if (step == 0) compare("all_gather", signature, false);
          for (int next = 1; next < size(); ++next) {
            const int peer = (rank() + next) % size();
            copy(outputs[peer].data + at, segment_.slot(peer, n), span(outputs[peer].bytes, at, each));
          }
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::reduce_scatter(const std::vector<ConstPart>& inputs, Part output, Kind kind, Reduction reduction,
                                 Terms terms) {
  size_t total = 0, longest = 0;
  for (const ConstPart& input : inputs) {
    total += input.bytes;
    longest = std::max(longest, input.bytes);
  }
  Signature signature = sign(Operation::kReduceScatter, total, 0, kind, reduction);
  add_sizes(signature, inputs, inputs[rank()].bytes == output.bytes, rank());
  const size_t width = size_of(kind);
  const size_t piece = segment_.slot_bytes() / size() / kLine * kLine;
  const size_t steps = num_rounds(longest, piece);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * piece;
    round(
        "reduce_scatter",
        [&](uint64_t n) {
          for (int next = 1; next < size(); ++next) {
            const int owner = (rank() + next) % size();
            copy(segment_.slot(rank(), n) + owner * piece, inputs[owner].data + at, span(inputs[owner].bytes, at, piece));
          }
        },
        [&](uint64_t n) {
          if (step == 0) compare("reduce_scatter", signature, true);
          const void* parts[kMaxRanks];
          for (int peer = 0; peer < size(); ++peer) parts[peer] = segment_.slot(peer, n) + rank() * piece;
          parts[rank()] = inputs[rank()].data + at;
          const size_t count = span(output.bytes, at, piece) / width;
          meshwright::reduce(output.data + at, nullptr, parts, size(), count, kind, reduction);
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::reduce_slices(const Pieces& data, const std::vector<size_t>& ends, Kind kind, Reduction reduction,
                                Terms terms) {
  std::vector<ConstPart> slices;
  size_t longest = 0;
  for (size_t owner = 0; owner < ends.size(); ++owner) {
    slices.push_back({nullptr, ends[owner] - (owner == 0 ? 0 : ends[owner - 1])});
    longest = std::max(longest, slices.back().bytes);
  }
  Signature signature = sign(Operation::kReduceScatter, data.bytes(), 0, kind, reduction);
  add_sizes(signature, slices, data.bytes() == ends.back(), rank());
  const size_t piece = segment_.slot_bytes() / size() / kLine * kLine;
  const size_t steps = num_rounds(longest, piece);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * piece;
    const auto begin_of = [&](int owner) { return ends[owner] - slices[owner].bytes + at; };
    const auto bytes_of = [&](int owner) { return span(slices[owner].bytes, at, piece); };
    round(
        "reduce_scatter",
        [&](uint64_t n) {
          for (int next = 1; next < size(); ++next) {
            const int owner = (rank() + next) % size();
            data.copy_out(segment_.slot(rank(), n) + owner * piece, begin_of(owner), bytes_of(owner));
          }
        },
        [&](uint64_t n) {
          if (step == 0) compare("reduce_scatter", signature, true);
          data.visit(begin_of(rank()), bytes_of(rank()), [&](char* own, size_t offset, size_t bytes) {
            const void* parts[kMaxRanks];
            for (int peer = 0; peer < size(); ++peer) parts[peer] = segment_.slot(peer, n) + rank() * piece + offset;
            parts[rank()] = own;
            meshwright::reduce(own, nullptr, parts, size(), bytes / size_of(kind), kind, reduction);
          });
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::broadcast(Part data, int root, Terms terms) {
  const Signature signature = sign(Operation::kBroadcast, data.bytes, root);
  const size_t each = segment_.slot_bytes();
  const size_t steps = num_rounds(data.bytes, each);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * each, bytes = span(data.bytes, at, each);
    round(
        "broadcast",
        [&](uint64_t n) {
          if (rank() == root) copy(segment_.slot(root, n), data.data + at, bytes);
        },
        [&](uint64_t n) {
          if (step == 0) compare("broadcast", signature, true);
          if (rank() != root) copy(data.data + at, segment_.slot(root, n), bytes);
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::reduce(char* data, size_t count, Kind kind, Reduction reduction, int root, Terms terms) {
  const size_t bytes = count * size_of(kind);
  const Signature signature = sign(Operation::kReduce, bytes, root, kind, reduction);
  const size_t each = segment_.slot_bytes();
  const size_t steps = num_rounds(bytes, each);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * each, now = span(bytes, at, each);
    round(
        "reduce",
        [&](uint64_t n) {
          if (rank() != root) copy(segment_.slot(rank(), n), data + at, now);
        },
        [&](uint64_t n) {
          if (step == 0) compare("reduce", signature, true);
          if (rank() != root) return;
          const void* parts[kMaxRanks];
          for (int peer = 0; peer < size(); ++peer) parts[peer] = segment_.slot(peer, n);
          parts[root] = data + at;
          meshwright::reduce(data + at, nullptr, parts, size(), now / size_of(kind), kind, reduction);
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::gather(ConstPart input, const std::vector<Part>& outputs, int root, Terms terms) {
  const Signature signature = sign(Operation::kGather, input.bytes, root);
  const size_t each = segment_.slot_bytes();
  const size_t steps = num_rounds(input.bytes, each);
  if (rank() == root) copy(outputs[root].data, input.data, input.bytes);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * each, bytes = span(input.bytes, at, each);
    round(
        "gather",
        [&](uint64_t n) {
          if (rank() != root) copy(segment_.slot(rank(), n), input.data + at, bytes);
        },
        [&](uint64_t n) {
          if (step == 0) compare("gather", signature, true);
          if (rank() != root) return;
          for (int peer = 0; peer < size(); ++peer) {
            if (peer != root) copy(outputs[peer].data + at, segment_.slot(peer, n), bytes);
          }
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::scatter(const std::vector<ConstPart>& inputs, Part output, int root, Terms terms) {
  const Signature signature = sign(Operation::kScatter, output.bytes, root);
  const size_t piece = segment_.slot_bytes() / size() / kLine * kLine;
  const size_t steps = num_rounds(output.bytes, piece);
  if (rank() == root) copy(output.data, inputs[root].data, output.bytes);
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * piece, bytes = span(output.bytes, at, piece);
    round(
        "scatter",
        [&](uint64_t n) {
          if (rank() != root) return;
          for (int peer = 0; peer < size(); ++peer) {
            if (peer != root) copy(segment_.slot(root, n) + peer * piece, inputs[peer].data + at, bytes);
          }
        },
        [&](uint64_t n) {
          if (step == 0) compare("scatter", signature, true);
          if (rank() != root) copy(output.data + at, segment_.slot(root, n) + rank() * piece, bytes);
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

// The first round also carries what each rank gives to, and expects from, every other: it tells all ranks how many rounds
// there are, and a disagreement anywhere is raised everywhere.
void Collectives::all_to_all(const std::vector<ConstPart>& inputs, const std::vector<Part>& outputs, Terms terms) {
  const Signature signature = sign(Operation::kAllToAll, 0);
  const size_t head = round_up(2 * size() * sizeof(uint64_t), kLine);
  const size_t piece = (segment_.slot_bytes() - head) / size() / kLine * kLine;
  copy(outputs[rank()].data, inputs[rank()].data, std::min(inputs[rank()].bytes, outputs[rank()].bytes));
  size_t steps = 1;
  for (size_t step = 0; step < steps; ++step) {
    const size_t at = step * piece;
    round(
        "all_to_all",
        [&](uint64_t n) {
          char* slot = segment_.slot(rank(), n);
          auto* sizes = reinterpret_cast<uint64_t*>(slot);
          for (int peer = 0; peer < size(); ++peer) {
            if (step == 0) {
              sizes[peer] = inputs[peer].bytes;
              sizes[size() + peer] = outputs[peer].bytes;
            }
            if (peer == rank()) continue;
            copy(slot + head + peer * piece, inputs[peer].data + at, span(inputs[peer].bytes, at, piece));
          }
        },
        [&](uint64_t n) {
          if (step == 0) {
            compare("all_to_all", signature, true);
            size_t longest = 0;
            for (int giver = 0; giver < size(); ++giver) {
              for (int taker = 0; taker < size(); ++taker) {
                const uint64_t given = reinterpret_cast<uint64_t*>(segment_.slot(giver, n))[taker];
                const uint64_t expected = reinterpret_cast<uint64_t*>(segment_.slot(taker, n))[size() + giver];
                if (given != expected) {
                  throw Mismatch("all_to_all: " + waiter_.name_of(giver) + " gives " + std::to_string(given) +
                                              " bytes to " + waiter_.name_of(taker) + ", which expects " +
                                              std::to_string(expected));
                }
                longest = std::max<size_t>(longest, given);
              }
            }
            steps = num_rounds(longest, piece);
          }
          for (int next = 1; next < size(); ++next) {
            const int peer = (rank() + next) % size();
            copy(outputs[peer].data + at, segment_.slot(peer, n) + head + rank() * piece,
                 span(outputs[peer].bytes, at, piece));
          }
        },
        terms, step == 0 ? &signature : nullptr);
  }
}

void Collectives::barrier(Terms terms) {
  const Signature signature = sign(Operation::kBarrier, 0);
  round("barrier", [](uint64_t) {}, [&](uint64_t) { compare("barrier", signature, true); }, terms, &signature);
}

}  // namespace meshwright
