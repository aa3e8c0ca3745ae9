// A token's sum over its experts
#pragma once

// The weighted sum over a token's slots, and what is added to it.
struct ExpertSumParams {
  uint32_t weights_dtype;
  uint32_t gate_dtype;
  uint32_t has_gate;
  uint32_t gate_is_logit;
  uint32_t has_shared;
  uint32_t has_residual;
};
