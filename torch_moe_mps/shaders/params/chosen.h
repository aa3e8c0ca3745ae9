// Experts that a matmul chooses: behind params/matmul.h and params/routing.h
#pragma once

// The first matmul of one token's experts, which chooses them.
struct ChosenParams {
  MatmulParams matmul;
  RouterParams router;
  uint32_t norms_inputs;
  uint32_t weights_on_inputs;  // those of the choice, and none on outputs
};
