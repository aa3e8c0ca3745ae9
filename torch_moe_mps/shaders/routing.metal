#include "bucket.h"
#include "gate.h"
#include "router.h"

#define INSTANTIATE(T, suffix)                                     \
  INSTANTIATE_KERNEL("route_" suffix "_2", route_rows<T, 2>)       \
  INSTANTIATE_KERNEL("route_" suffix "_4", route_rows<T, 4>)       \
  INSTANTIATE_KERNEL("route_" suffix "_8", route_rows<T, 8>)       \
  INSTANTIATE_KERNEL("route_" suffix "_16", route_rows<T, 16>)     \
  INSTANTIATE_KERNEL("route_" suffix "_32", route_rows<T, 32>)     \
  INSTANTIATE_KERNEL("gate_" suffix "_1", gate_tokens<T, 1, 1024>) \
  INSTANTIATE_KERNEL("gate_" suffix "_4", gate_tokens<T, 4, 512>)  \
  INSTANTIATE_KERNEL("gate_" suffix "_16", gate_tokens<T, 16, 512>)

INSTANTIATE(float, "f32")
INSTANTIATE(half, "f16")
INSTANTIATE(bfloat, "bf16")

INSTANTIATE_KERNEL("bucket_pairs_i32", bucket_pairs<int>)
INSTANTIATE_KERNEL("bucket_pairs_i64", bucket_pairs<long>)
INSTANTIATE_KERNEL("ids_by_expert_i32", ids_by_expert<int>)
INSTANTIATE_KERNEL("ids_by_expert_i64", ids_by_expert<long>)
