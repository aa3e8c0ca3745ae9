#pragma once

// Params of kernels that measure a GPU.
struct ProbeParams {
  uint32_t steps;  // of a thread's loop
};
