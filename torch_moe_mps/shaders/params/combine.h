// Combine
#pragma once

struct SiluMulParams {
  uint64_t count;
  uint32_t vectorised;
};

struct WeightedSumParams {
  ExpertSumParams sum;
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t in_place;     // the residual is in the output
  uint32_t has_weights;  // else every slot counts 1
};

struct WeightedSumNormParams {
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t weights_dtype;
  uint32_t norm_dtype;
  float eps;
};

// The gradients of a weighted sum.
struct WeightedSumBackwardParams {
  uint32_t pairs;
  uint32_t slots;
  uint32_t width;
  uint32_t vectorised;
  uint32_t weights_dtype;
};
