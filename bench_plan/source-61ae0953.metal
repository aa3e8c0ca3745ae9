using namespace metal;
struct RouterParams {
int num_experts;
int top_k;
int norm_topk_prob;
};
kernel void moe_router_topk_softmax_f32(
device const float * logits [[buffer(0)]],
device int * out_ids [[buffer(1)]],
device float * out_weights [[buffer(2)]],
constant RouterParams & p [[buffer(3)]],
threadgroup float * shmem [[threadgroup(0)]],
uint3 tgpig [[threadgroup_position_in_grid]],
ushort tiisg [[thread_index_in_simdgroup]])
{
const int row = tgpig.x;
const int n_exp = p.num_experts;
const int top_k = p.top_k;
threadgroup float * probs = shmem;
float thread_max = -INFINITY;
for (int i = tiisg; i < n_exp; i += 32) {
const float v = logits[row * n_exp + i];
probs[i] = v;
thread_max = max(thread_max, v);
}
float row_max = simd_max(thread_max);
float thread_sum = 0.0f;
for (int i = tiisg; i < n_exp; i += 32) {
const float e = exp(probs[i] - row_max);
probs[i] = e;
thread_sum += e;
}
float row_sum = simd_sum(thread_sum);
float inv_sum = 1.0f / row_sum;
for (int i = tiisg; i < n_exp; i += 32) {
probs[i] *= inv_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
threadgroup float * sel_weights = (threadgroup float *)(probs + n_exp);
threadgroup int * sel_idxs = (threadgroup int *)(sel_weights + top_k);
threadgroup float * renorm_slot = (threadgroup float *)(sel_idxs + top_k);
if (tiisg == 0) {
renorm_slot[0] = 0.0f;
}
for (int k = 0; k < top_k; k++) {
float thread_best = -INFINITY;
int thread_idx = -1;
for (int i = tiisg; i < n_exp; i += 32) {
const float v = probs[i];
if (v > thread_best) {
thread_best = v;
thread_idx = i;
}
}
const float best = simd_max(thread_best);
int my_idx_for_min = (thread_best == best) ? thread_idx : 0x7fffffff;
const int win_idx = simd_min(my_idx_for_min);
if (tiisg == 0) {
sel_weights[k] = best;
sel_idxs[k] = win_idx;
renorm_slot[0] += best;
probs[win_idx] = -INFINITY;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
}
float scale = 1.0f;
if (p.norm_topk_prob != 0) {
scale = 1.0f / max(renorm_slot[0], 6.103515625e-5f);
}
if (tiisg < top_k) {
out_ids[row * top_k + tiisg] = sel_idxs[tiisg];
out_weights[row * top_k + tiisg] = sel_weights[tiisg] * scale;
}
}
constant int FERRUM_IDS_TPE_THREADS = 256;
constant int FERRUM_IDS_TPE_NSG = 8;
constant int FERRUM_GEMM_NR0 = 64;
constant int FERRUM_GEMM_NR1 = 32;
struct ComputeIdsTpeParams {
int num_experts;
int row_stride;
int total_pairs;
int m_gate_up;
int m_down;
};
kernel void moe_compute_ids_tpe_f32(
device const int * selected_ids [[buffer(0)]],
device atomic_int * tpe [[buffer(1)]],
device int * ids [[buffer(2)]],
device uint * gate_up_args [[buffer(3)]],
device uint * down_args [[buffer(4)]],
constant ComputeIdsTpeParams & p [[buffer(5)]],
uint tid [[thread_position_in_threadgroup]],
ushort tiisg [[thread_index_in_simdgroup]],
ushort sgitg [[simdgroup_index_in_threadgroup]])
{
for (int e = int(tid); e < p.num_experts; e += FERRUM_IDS_TPE_THREADS) {
atomic_store_explicit(&tpe[e], 0, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_device);
for (int pair_idx = int(tid); pair_idx < p.total_pairs; pair_idx += FERRUM_IDS_TPE_THREADS) {
const int e = selected_ids[pair_idx];
if (e >= 0 && e < p.num_experts) {
const int slot = atomic_fetch_add_explicit(&tpe[e], 1, memory_order_relaxed);
ids[e * p.row_stride + slot] = pair_idx;
}
}
threadgroup_barrier(mem_flags::mem_device);
int local_max = 0;
for (int e = int(tid); e < p.num_experts; e += FERRUM_IDS_TPE_THREADS) {
const int v = atomic_load_explicit(&tpe[e], memory_order_relaxed);
if (v > local_max) {
local_max = v;
}
}
const int sg_max = simd_max(local_max);
threadgroup int sg_results[FERRUM_IDS_TPE_NSG];
if (tiisg == 0) {
sg_results[sgitg] = sg_max;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (tid == 0) {
int max_pe = 0;
for (int s = 0; s < FERRUM_IDS_TPE_NSG; ++s) {
if (sg_results[s] > max_pe) {
max_pe = sg_results[s];
}
}
uint grid_x = uint((max_pe + FERRUM_GEMM_NR1 - 1) / FERRUM_GEMM_NR1);
if (grid_x < 1u) {
grid_x = 1u;
}
const uint grid_z = uint(p.num_experts);
const uint grid_y_gate_up = uint((p.m_gate_up + FERRUM_GEMM_NR0 - 1) / FERRUM_GEMM_NR0);
const uint grid_y_down = uint((p.m_down + FERRUM_GEMM_NR0 - 1) / FERRUM_GEMM_NR0);
gate_up_args[0] = grid_x;
gate_up_args[1] = grid_y_gate_up;
gate_up_args[2] = grid_z;
down_args[0] = grid_x;
down_args[1] = grid_y_down;
down_args[2] = grid_z;
}
}
