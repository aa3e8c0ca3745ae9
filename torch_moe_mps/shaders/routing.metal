#include "bucket.h"
#include "gate.h"
#include "router.h"

#define INSTANTIATE_ROUTER(T, suffix, N)                                                                     \
  template [[host_name("route_" suffix "_" #N)]] [[kernel]] decltype(route_rows<T, N>) route_rows<T, N>;
#define INSTANTIATE_ROUTERS(T, suffix) \
  INSTANTIATE_ROUTER(T, suffix, 2)     \
  INSTANTIATE_ROUTER(T, suffix, 4)     \
  INSTANTIATE_ROUTER(T, suffix, 8)     \
  INSTANTIATE_ROUTER(T, suffix, 16)    \
  INSTANTIATE_ROUTER(T, suffix, 32)

INSTANTIATE_ROUTERS(float, "f32")
INSTANTIATE_ROUTERS(half, "f16")
INSTANTIATE_ROUTERS(bfloat, "bf16")

#define INSTANTIATE_GATE(W, suffix, M, threads)                                                                           \
  template [[host_name("gate_" suffix "_" #M)]] [[kernel]] decltype(gate_tokens<W, M, threads>) gate_tokens<W, M, threads>;
#define INSTANTIATE_GATES(W, suffix)     \
  INSTANTIATE_GATE(W, suffix, 1, 1024)   \
  INSTANTIATE_GATE(W, suffix, 4, 512)    \
  INSTANTIATE_GATE(W, suffix, 16, 512)

INSTANTIATE_GATES(float, "f32")
INSTANTIATE_GATES(half, "f16")
INSTANTIATE_GATES(bfloat, "bf16")

#define INSTANTIATE_IDS(Id, suffix)                                                                         \
  template [[host_name("bucket_pairs_" suffix)]] [[kernel]] decltype(bucket_pairs<Id>) bucket_pairs<Id>;    \
  template [[host_name("ids_by_expert_" suffix)]] [[kernel]] decltype(ids_by_expert<Id>) ids_by_expert<Id>;

INSTANTIATE_IDS(int, "i32")
INSTANTIATE_IDS(long, "i64")
