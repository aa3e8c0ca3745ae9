// Definitions that every shader uses. common/ has what several do, a file for each subject.
#pragma once
#include <metal_stdlib>

#include "geometry/common.h"
#include "params/common.h"

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")
// Keeps the compiler from unrolling: several rounds in flight would take too many registers.
#define ROLLED _Pragma("clang loop unroll(disable)")

// A kernel template with its arguments, under a name for the host. The host compiles a file for one dtype at
// a time, MOE_DTYPE, and for one format of weights, MOE_WEIGHTS; MOE_SUFFIX names them.
#define INSTANTIATE(name, ...) \
  template[[host_name(name MOE_SUFFIX)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// A kernel's arguments: which thread it is.
#define LANES uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]

inline ulong token_start(TokenStrides strides, uint batch, uint token, uint head) {
  return batch * strides.batch + token * strides.token + head * strides.head;
}

// Threadgroup memory for one value of each of up to 32 simdgroups.
constant constexpr uint kMaxSimdgroups = 32;
