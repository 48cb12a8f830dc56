// Fills a tensor with numbers of Philox 4x32-10 by its elements' places, on a GPU: the same bits as `philox.cpp`.
//
// One thread an element. `loops` holds count, step of the sample and step of the index of each level, the innermost last.
// Compiled by NVRTC when a GPU first draws; `gpu.py` compares its numbers with those of torch operators before it is used.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

extern "C" __global__ void meshwright_philox(const i64* loops, int levels, u32 total_low, u32 total_high, u32 key_low,
                                             u32 key_high, u32 sample_low, u32 sample_high, u32 index_low, u32 index_high,
                                             int kind, int param, int param_high, void* out) {
  const i64 total = (i64)((u64)total_high << 32 | total_low);
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= total) return;
  u64 sample = (u64)sample_high << 32 | sample_low, index = (u64)index_high << 32 | index_low;
  u64 rest = (u64)at;
  for (int level = levels - 1; level >= 0; --level) {
    const u64 count = (u64)loops[3 * level];
    u64 here;
    if (level == 0) {
      here = rest;
    } else if ((rest | count) >> 32) {
      here = rest % count;
      rest /= count;
    } else {  // a division of 32 bits is several times faster
      here = (u32)rest % (u32)count;
      rest = (u32)rest / (u32)count;
    }
    sample += here * (u64)loops[3 * level + 1];
    index += here * (u64)loops[3 * level + 2];
  }
  u32 words[2];
  const int planes = kind == 3 || (kind == 0 && param) ? 2 : 1;
  for (int plane = 0; plane < planes; ++plane) {
    const u64 block = index >> 2;
    u32 c0 = (u32)block, c1 = (u32)(block >> 32) | ((u32)plane << 24), c2 = (u32)sample, c3 = (u32)(sample >> 32);
    u32 k0 = key_low, k1 = key_high;
    for (int round = 0; round < 10; ++round) {
      const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
      c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
      c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
      c1 = (u32)p1;
      c3 = (u32)p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const u32 which = (u32)index & 3u;
    words[plane] = which == 0 ? c0 : which == 1 ? c1 : which == 2 ? c2 : c3;
  }
  if (kind == 0) {  // the word of plane `param`
    ((u32*)out)[at] = words[param ? 1 : 0];
  } else if (kind == 1) {  // one byte: whether the word is at most `param`
    ((unsigned char*)out)[at] = words[0] <= (u32)param ? 1 : 0;
  } else if (kind == 2) {  // float32, a multiple of 2**-param in [0, 1); `param_high` has the bits of 2**-param
    union { u32 bits; float value; } scale;
    scale.bits = (u32)param_high;
    ((float*)out)[at] = (float)(int)(words[0] >> (32 - param)) * scale.value;
  } else {  // float64, a multiple of 2**-53 in [0, 1)
    const u64 both = ((u64)words[0] << 32 | words[1]) >> 11;
    ((double*)out)[at] = (double)(i64)both * (1.0 / 9007199254740992.0);
  }
}
