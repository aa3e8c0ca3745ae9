// How many rows, tokens and threads a threadgroup takes: the host sizes grids and threadgroup memory by these
// numbers, the kernels index by them. Numbers without a comment are untuned. geometry/ has a file for each
// family, this one what all share.
#pragma once
#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define GEOMETRY constant constexpr uint
#else
#include <cstdint>
#define GEOMETRY inline constexpr int64_t
#endif

GEOMETRY kSimdWidth = 32;
