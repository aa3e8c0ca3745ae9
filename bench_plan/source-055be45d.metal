using namespace metal;
struct SiluMulStackedParams {
int ffn;
int n_slots;
};
kernel void silu_mul_stacked_f32(
device const float* gate [[buffer(0)]],
device const float* up [[buffer(1)]],
device float* out [[buffer(2)]],
constant SiluMulStackedParams& p [[buffer(3)]],
uint3 tgpig [[threadgroup_position_in_grid]],
uint3 tpig [[thread_position_in_threadgroup]])
{
const uint slot = tgpig.y;
if (slot >= uint(p.n_slots)) return;
const uint i = tgpig.x * 256 + tpig.x;
if (i >= uint(p.ffn)) return;
const uint off = slot * uint(p.ffn) + i;
const float g = gate[off];
const float u = up[off];
const float s = g / (1.0f + exp(-g));
out[off] = s * u;
}
struct WeightedSumStackedParams {
int hidden;
int n_slots;
};
kernel void weighted_sum_residual_stacked_f32(
device const float* slots [[buffer(0)]],
device const float* weights [[buffer(1)]],
device float* residual [[buffer(2)]],
constant WeightedSumStackedParams& p [[buffer(3)]],
uint3 tgpig [[threadgroup_position_in_grid]],
uint3 tpig [[thread_position_in_threadgroup]])
{
const uint i = tgpig.x * 256 + tpig.x;
if (i >= uint(p.hidden)) return;
float sum = 0.0f;
for (int s = 0; s < p.n_slots; s++) {
sum += weights[s] * slots[s * uint(p.hidden) + i];
}
residual[i] += sum;
}
kernel void weighted_sum_stacked_f32(
device const float* slots [[buffer(0)]],
device const float* weights [[buffer(1)]],
device float* out [[buffer(2)]],
constant WeightedSumStackedParams& p [[buffer(3)]],
uint3 tgpig [[threadgroup_position_in_grid]],
uint3 tpig [[thread_position_in_threadgroup]])
{
const uint i = tgpig.x * 256 + tpig.x;
if (i >= uint(p.hidden)) return;
float sum = 0.0f;
for (int s = 0; s < p.n_slots; s++) {
sum += weights[s] * slots[s * uint(p.hidden) + i];
}
out[i] = sum;
}
constant int WSUM_NORM_THREADS = 256;
constant int WSUM_NORM_NSG = 8;
struct WSumResNormParams {
int hidden;
int n_slots;
float eps;
};
kernel void weighted_sum_residual_norm_stacked_f32(
device const float* slots [[buffer(0)]],
device const float* weights [[buffer(1)]],
device float* residual [[buffer(2)]],
device const float* next_norm_w [[buffer(3)]],
device float* normed_out [[buffer(4)]],
constant WSumResNormParams& p [[buffer(5)]],
uint3 tgpig [[threadgroup_position_in_grid]],
uint3 tpitg [[thread_position_in_threadgroup]],
uint tiisg [[thread_index_in_simdgroup]],
uint sgitg [[simdgroup_index_in_threadgroup]])
{
const int hidden = p.hidden;
const int n_slots = p.n_slots;
const int tid = int(tpitg.x);
float local_sum_sq = 0.0f;
for (int i = tid; i < hidden; i += WSUM_NORM_THREADS) {
float sum = 0.0f;
for (int s = 0; s < n_slots; s++) {
sum += weights[s] * slots[s * hidden + i];
}
const float new_val = residual[i] + sum;
residual[i] = new_val;
local_sum_sq += new_val * new_val;
}
const float sg_part = simd_sum(local_sum_sq);
threadgroup float sg_sum_sq[WSUM_NORM_NSG];
if (tiisg == 0) {
sg_sum_sq[sgitg] = sg_part;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
threadgroup float scale_slot[1];
if (tid == 0) {
float total_sq = 0.0f;
for (int s = 0; s < WSUM_NORM_NSG; ++s) {
total_sq += sg_sum_sq[s];
}
scale_slot[0] = 1.0f / sqrt(total_sq / float(hidden) + p.eps);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const float scale = scale_slot[0];
for (int i = tid; i < hidden; i += WSUM_NORM_THREADS) {
normed_out[i] = residual[i] * scale * next_norm_w[i];
}
}
