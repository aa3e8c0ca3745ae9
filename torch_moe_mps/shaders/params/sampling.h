#pragma once

struct SampleParams {
  uint64_t row_stride;  // of the logits, in elements
  uint32_t rows;
  uint32_t vocabulary;
  uint32_t top_k;      // 0: of all
  uint32_t weight;     // that top-p keeps, of kWholeWeight
  uint32_t otherwise;  // the token of a row that has no distribution
  float temperature;   // 1 without draws
  float min_p;
  uint32_t has_draws;  // 0: the token with the highest logit
  uint32_t has_invalid;
};
