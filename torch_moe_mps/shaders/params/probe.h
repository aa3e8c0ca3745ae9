#pragma once

// What measures a GPU.
struct ProbeParams {
  uint32_t steps;  // of a thread's loop
};
