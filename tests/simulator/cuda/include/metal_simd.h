// A simdgroup is a warp, a threadgroup a block.
//
// With METAL_MATRIX_LANES the lanes of a simdgroup are numbered differently from those of the warp, so that a
// simdgroup_matrix in the layout of Apple's GPUs has the layout of the tensor cores, and no product needs a
// shuffle. Lane and thread are two orders of the bits (row 2, column 1, row 1, row 0, column 0) and
// (row 2, row 1, row 0, column 1, column 0), in units of two columns.
#pragma once
#include "metal_math.h"

namespace metal {
#ifdef METAL_MATRIX_LANES
constexpr METAL_FUNC uint lane_of_thread(uint t) {
  return (t & 17) | (t >> 1 & 1) << 3 | (t >> 2 & 3) << 1;
}
constexpr METAL_FUNC uint thread_of_lane(uint l) {
  return (l & 17) | (l >> 3 & 1) << 1 | (l >> 1 & 3) << 2;
}
#else
constexpr METAL_FUNC uint lane_of_thread(uint t) {
  return t;
}
constexpr METAL_FUNC uint thread_of_lane(uint l) {
  return l;
}
#endif

// What a kernel's arguments are made from.
METAL_FUNC uint warp_thread() {
  uint thread;
  asm("mov.u32 %0, %%laneid;" : "=r"(thread));
  return thread;
}
METAL_FUNC uint lane() {
  return lane_of_thread(warp_thread());
}
METAL_FUNC uint thread_index() {
  const uint linear = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  return (linear & ~31u) | lane_of_thread(linear & 31);
}
METAL_FUNC uint3 group_position() {
  return uint3(blockIdx.x, blockIdx.y, blockIdx.z);
}
METAL_FUNC uint3 group_size() {
  return uint3(blockDim.x, blockDim.y, blockDim.z);
}
METAL_FUNC uint3 grid_size() {
  return uint3(gridDim.x, gridDim.y, gridDim.z);
}
METAL_FUNC uint3 thread_position() {
  const uint index = thread_index();
  return uint3(index % blockDim.x, index / blockDim.x % blockDim.y, index / (blockDim.x * blockDim.y));
}
METAL_FUNC uint simdgroup_count() {
  return (blockDim.x * blockDim.y * blockDim.z + 31) / 32;
}

// An argument's value in the type that the kernel declares.
struct Position {
  uint3 v;
  METAL_FUNC operator uint() const { return v.x; }
  METAL_FUNC operator ushort() const { return ushort(v.x); }
  METAL_FUNC operator uint2() const { return uint2(v.x, v.y); }
  METAL_FUNC operator ushort2() const { return ushort2(v.x, v.y); }
  METAL_FUNC operator uint3() const { return v; }
  METAL_FUNC operator ushort3() const { return ushort3(v); }
};
struct Pointer {
  const void* p;
  template <class T>
  METAL_FUNC operator T*() const {
    return (T*)p;
  }
};
struct Reference {
  const void* p;
  template <class T>
  METAL_FUNC operator T&() const {
    return *(T*)p;
  }
};
template <int N>
struct alignas(16) Bytes {
  uchar v[N];
};

METAL_FUNC void threadgroup_barrier(mem_flags) {
  __syncthreads();
}
METAL_FUNC void simdgroup_barrier(mem_flags) {
  __syncwarp();
}

// `move` one 32-bit word of a value from another thread of the warp.
template <class T, class F>
METAL_FUNC T by_words(T value, F move) {
  constexpr int count = (sizeof(T) + 3) / 4;
  uint words[count] = {};
  memcpy(words, &value, sizeof(T));
  _Pragma("unroll") for (int i = 0; i < count; ++i) words[i] = move(words[i]);
  memcpy(&value, words, sizeof(T));
  return value;
}
template <class T>
METAL_FUNC T simd_shuffle(T value, ushort from) {
  const uint thread = thread_of_lane(from & 31);
  return by_words(value, [thread](uint word) { return __shfl_sync(~0u, word, thread); });
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask) {
  const uint threads = thread_of_lane(mask & 31);
  return by_words(value, [threads](uint word) { return __shfl_xor_sync(~0u, word, threads); });
}
template <class T>
METAL_FUNC T simd_broadcast(T value, ushort from) {
  return simd_shuffle(value, from);
}
template <class T>
METAL_FUNC T simd_shuffle_down(T value, ushort by) {
  const uint from = lane() + by;
  return simd_shuffle(value, from < 32 ? from : lane());
}
template <class T>
METAL_FUNC T simd_shuffle_up(T value, ushort by) {
  return simd_shuffle(value, lane() >= by ? lane() - by : lane());
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T value, T filling, ushort by) {
  const T moved = simd_shuffle(value, lane() - by), filled = simd_shuffle(filling, lane() - by + 32);
  return lane() >= by ? moved : filled;
}

#define METAL_REDUCTION(name, combined)                           \
  template <class T>                                              \
  METAL_FUNC T name(T a) {                                        \
    _Pragma("unroll") for (uint step = 1; step < 32; step *= 2) { \
      const T b = simd_shuffle_xor(a, step);                      \
      a = combined;                                               \
    }                                                             \
    return a;                                                     \
  }
METAL_REDUCTION(simd_sum, a + b)
METAL_REDUCTION(simd_min, min(a, b))
METAL_REDUCTION(simd_max, max(a, b))

template <class T>
METAL_FUNC T simd_prefix_inclusive_sum(T value) {
  _Pragma("unroll") for (uint step = 1; step < 32; step *= 2) {
    const T before = simd_shuffle_up(value, step);
    if (lane() >= step) value += before;
  }
  return value;
}
template <class T>
METAL_FUNC T simd_prefix_exclusive_sum(T value) {
  const T before = simd_shuffle_up(simd_prefix_inclusive_sum(value), 1);
  return lane() == 0 ? T(0) : before;
}

struct simd_vote {
  typedef ulong vote_t;
  uint v;
  METAL_FUNC explicit operator vote_t() const { return v; }
};
// Bit i is lane i's: the bits of threads 2 to 7, 10 to 15 and so on change places as the threads do.
METAL_FUNC simd_vote simd_ballot(bool predicate) {
  uint bits = __ballot_sync(~0u, predicate);
#ifdef METAL_MATRIX_LANES
  uint moved = 0;
  _Pragma("unroll") for (uint l = 0; l < 32; ++l) moved |= (bits >> thread_of_lane(l) & 1) << l;
  bits = moved;
#endif
  return {bits};
}
}  // namespace metal
