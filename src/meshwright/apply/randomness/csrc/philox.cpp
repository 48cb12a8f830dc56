// Fills a tensor with numbers of Philox 4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405), by its elements' places.
//
// An element's number is a function of (key, sample, index, plane) alone: counter = {index / 4, plane and the rest of index / 4,
// sample low, sample high}, word index % 4. `philox.py` computes the same bits with torch operators.
// Plain C interface, without torch: it builds in two seconds and fits every version.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxLevels = 8;
constexpr int kBlocks = 32;  // counters at a time, for vector instructions
constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

struct Place {
  uint64_t key;
  int64_t count[kMaxLevels];   // entries of each level, the innermost last
  int64_t sample[kMaxLevels];  // how far one entry moves the sample
  int64_t index[kMaxLevels];   // and the index within the sample
  int64_t levels;
  int64_t first_sample;
  int64_t first_index;
  int64_t rows;                // rows that lie in any order, each with the levels inside; -1: the levels are all there is
  const int64_t* row_sample;   // each row's sample, in place of first_sample
  const int64_t* row_index;    // and by how much its first element's index is moved
};

// Writes four words for each of so many blocks, which are numbered within their samples.
inline void generate(uint64_t key, const uint64_t* block, uint32_t plane, const uint64_t* sample, int blocks,
                     uint32_t* words) {
  uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (int j = 0; j < blocks; ++j) {
    c0[j] = static_cast<uint32_t>(block[j]);
    c1[j] = static_cast<uint32_t>(block[j] >> 32) | (plane << 24);
    c2[j] = static_cast<uint32_t>(sample[j]);
    c3[j] = static_cast<uint32_t>(sample[j] >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int j = 0; j < blocks; ++j) {
      const uint64_t p0 = static_cast<uint64_t>(kMul0) * c0[j], p1 = static_cast<uint64_t>(kMul1) * c2[j];
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1[j] ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3[j] ^ k1;
      c1[j] = static_cast<uint32_t>(p1);
      c3[j] = static_cast<uint32_t>(p0);
      c0[j] = n0;
      c2[j] = n2;
    }
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  for (int j = 0; j < blocks; ++j) {
    words[4 * j] = c0[j];
    words[4 * j + 1] = c1[j];
    words[4 * j + 2] = c2[j];
    words[4 * j + 3] = c3[j];
  }
}

// Collects blocks of one run of indices or of many short ones, and computes as many as fill vector instructions at a time.
// Calls emit(words of plane 0, words of plane 1, offset in the output, count). `flush` computes what is left.
template <int Planes, class Emit>
class Blocks {
 public:
  Blocks(uint64_t key, const Emit& emit) : key_(key), emit_(emit) {}

  // Takes consecutive indices of one sample.
  void add(uint64_t sample, uint64_t index, int64_t count, int64_t out) {
    while (count > 0) {
      const int skip = static_cast<int>(index & 3);
      const int64_t most = (count + skip + 3) / 4;
      const int blocks = most < kBlocks - filled_ ? static_cast<int>(most) : kBlocks - filled_;
      const int64_t took = 4 * blocks - skip < count ? 4 * blocks - skip : count;
      for (int j = 0; j < blocks; ++j) {
        block_[filled_ + j] = (index >> 2) + static_cast<uint64_t>(j);
        sample_[filled_ + j] = sample;
      }
      pieces_[taken_++] = {4 * filled_ + skip, out, took};
      filled_ += blocks;
      if (filled_ == kBlocks) flush();
      index += took;
      out += took;
      count -= took;
    }
  }

  void flush() {
    for (int plane = 0; plane < Planes; ++plane) {
      if (filled_ == kBlocks) {  // a constant, so that loops are unrolled
        generate(key_, block_, plane, sample_, kBlocks, words_[plane]);
      } else {
        generate(key_, block_, plane, sample_, filled_, words_[plane]);
      }
    }
    for (int at = 0; at < taken_; ++at) {
      const Piece& piece = pieces_[at];
      emit_(words_[0] + piece.begin, words_[Planes - 1] + piece.begin, piece.out, piece.count);
    }
    filled_ = taken_ = 0;
  }

 private:
  struct Piece {
    int begin;  // its first word
    int64_t out, count;
  };

  uint64_t key_;
  const Emit& emit_;
  int filled_ = 0, taken_ = 0;
  uint64_t block_[kBlocks], sample_[kBlocks];
  Piece pieces_[kBlocks];
  alignas(64) uint32_t words_[Planes][4 * kBlocks];
};

// Walks the elements from `begin` to `end` of a contiguous output that itself begins at `base`.
template <class Taker>
void walk(const Place& place, int64_t begin, int64_t end, int64_t base, Taker& taker) {
  const int64_t last = place.levels - 1;
  const bool runs = place.index[last] == 1 && place.sample[last] == 0;
  const int64_t length = runs ? place.count[last] : 1;
  const int64_t outer = runs ? last : place.levels;
  int64_t at[kMaxLevels] = {0};
  int64_t rest = begin / length, offset = begin % length;
  int64_t sample = place.first_sample, index = place.first_index;
  for (int64_t level = outer - 1; level >= 0; --level) {
    at[level] = rest % place.count[level];
    rest /= place.count[level];
    sample += at[level] * place.sample[level];
    index += at[level] * place.index[level];
  }
  for (int64_t out = begin; out < end;) {
    const int64_t took = length - offset < end - out ? length - offset : end - out;
    taker.add(sample, index + offset, took, base + out);
    out += took;
    offset = 0;
    for (int64_t level = outer - 1; level >= 0; --level) {
      sample += place.sample[level];
      index += place.index[level];
      if (++at[level] < place.count[level]) break;
      sample -= at[level] * place.sample[level];
      index -= at[level] * place.index[level];
      at[level] = 0;
    }
  }
}

// Walks rows from `begin` to `end`, each of so many elements.
template <class Taker>
void walk_rows(const Place& place, int64_t length, int64_t begin, int64_t end, Taker& taker) {
  Place row = place;
  const bool is_run = place.levels == 1 && place.index[0] == 1 && place.sample[0] == 0;
  for (int64_t at = begin; at < end; ++at) {
    row.first_sample = place.row_sample[at];
    row.first_index = place.first_index + place.row_index[at];
    if (is_run) {
      taker.add(row.first_sample, row.first_index, length, at * length);
    } else {
      walk(row, 0, length, at * length, taker);
    }
  }
}

template <int Planes, class Emit>
void fill(const Place& place, int64_t threads, const Emit& emit) {
  int64_t length = 1;
  for (int64_t level = 0; level < place.levels; ++level) length *= place.count[level];
  if (length == 0) return;
  const int64_t total = place.rows >= 0 ? place.rows : length;
  const auto part_of = [&place, &emit, length](int64_t begin, int64_t end) {
    Blocks<Planes, Emit> blocks(place.key, emit);
    if (place.rows >= 0) {
      walk_rows(place, length, begin, end, blocks);
    } else {
      walk(place, begin, end, 0, blocks);
    }
    blocks.flush();
  };
  if (threads <= 1) {
    part_of(0, total);
    return;
  }
  std::vector<std::thread> others;
  for (int64_t part = 1; part < threads; ++part)
    others.emplace_back([&part_of, total, threads, part] {
      part_of(total * part / threads, total * (part + 1) / threads);
    });
  part_of(0, total / threads);
  for (auto& other : others) other.join();
}

template <class T>
void keep(const Place& place, int64_t threads, uint32_t most, T one, T* out) {
  fill<1>(place, threads, [=](const uint32_t* words, const uint32_t*, int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[at + i] = words[i] <= most ? one : T(0);
  });
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t meshwright_philox_version() { return 2; }

// out[i] = the 32-bit word of a plane.
EXPORT void meshwright_philox_words(const void* place, int64_t threads, int64_t plane, uint32_t* out) {
  const Place& given = *static_cast<const Place*>(place);
  if (plane) {
    fill<2>(given, threads, [=](const uint32_t*, const uint32_t* words, int64_t at, int64_t count) {
      std::memcpy(out + at, words, static_cast<size_t>(count) * 4);
    });
  } else {
    fill<1>(given, threads, [=](const uint32_t* words, const uint32_t*, int64_t at, int64_t count) {
      std::memcpy(out + at, words, static_cast<size_t>(count) * 4);
    });
  }
}

// out[i] = the bits `one` where the word is at most `most`, else 0; entries of `width` bytes.
EXPORT void meshwright_philox_keep(const void* place, int64_t threads, uint32_t most, uint64_t one, int64_t width,
                                   void* out) {
  const Place& given = *static_cast<const Place*>(place);
  if (width == 8) keep<uint64_t>(given, threads, most, one, static_cast<uint64_t*>(out));
  if (width == 4) keep<uint32_t>(given, threads, most, static_cast<uint32_t>(one), static_cast<uint32_t*>(out));
  if (width == 2) keep<uint16_t>(given, threads, most, static_cast<uint16_t>(one), static_cast<uint16_t*>(out));
  if (width == 1) keep<uint8_t>(given, threads, most, static_cast<uint8_t>(one), static_cast<uint8_t*>(out));
}

// out[i] = a multiple of 2**-bits in [0, 1), in float32 (bits <= 24).
EXPORT void meshwright_philox_uniform32(const void* place, int64_t threads, int64_t bits, float* out) {
  const float scale = std::ldexp(1.0f, -static_cast<int>(bits));
  const int shift = 32 - static_cast<int>(bits);
  fill<1>(*static_cast<const Place*>(place), threads, [=](const uint32_t* words, const uint32_t*, int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[at + i] = static_cast<float>(static_cast<int32_t>(words[i] >> shift)) * scale;
  });
}

// out[i] = a multiple of 2**-53 in [0, 1).
EXPORT void meshwright_philox_uniform64(const void* place, int64_t threads, double* out) {
  fill<2>(*static_cast<const Place*>(place), threads, [=](const uint32_t* high, const uint32_t* low, int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t both = (static_cast<uint64_t>(high[i]) << 32 | low[i]) >> 11;
      out[at + i] = static_cast<double>(static_cast<int64_t>(both)) * 0x1p-53;
    }
  });
}

// Places of rows that an index chose: sources[i] is a row's number among those that were there to choose, `each` of a sample;
// with `minor` samples lie innermost. counts[row * samples + sample] is how often a sample's row has drawn: a row that has goes on
// above `turn_bits` of its sample's number.
EXPORT void meshwright_chosen_rows(const int64_t* sources, int64_t count, int64_t* counts, int64_t each, int64_t samples,
                                   int64_t minor, int64_t first, int64_t turn_bits, int64_t* sample, int64_t* index) {
  const int64_t width = minor ? samples : each;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = sources[i], high = source / width, low = source % width;
    const int64_t own = minor ? low : high, row = minor ? high : low;
    const int64_t turn = counts[row * samples + own]++;
    sample[i] = own + first + turn * (int64_t{1} << turn_bits);
    index[i] = row;
  }
}
