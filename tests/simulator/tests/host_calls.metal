#include <metal_stdlib>
using namespace metal;

kernel void axpy(device const float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                 device float* out [[buffer(2)]], constant float& alpha [[buffer(3)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = alpha * x[i] + y[i];
}

kernel void make_grid(device const int* groups [[buffer(0)]], device int* grid [[buffer(1)]]) {
  grid[2] = groups[0];
  grid[3] = 1;
  grid[4] = 1;
}

kernel void mark(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = int(i) + 1;
}

kernel void overrun(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i + 1000] = 1;
}

kernel void scratch(device float* out [[buffer(0)]], threadgroup float* memory [[threadgroup(0)]],
                    uint i [[thread_position_in_threadgroup]]) {
  memory[i] = 1;
  out[i] = memory[i];
}

[[max_total_threads_per_threadgroup(64)]]
kernel void narrow(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = 1;
}
