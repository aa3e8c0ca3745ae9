#pragma once

struct SampleParams {
  uint64_t row_stride;  // of the logits, in elements
  uint64_t invalid_stride;
  uint32_t vocabulary;
  uint32_t top_k;      // 0: of all
  uint32_t weight;     // that top-p keeps, of kWholeWeight
  uint32_t otherwise;  // the token of a row that has no distribution
  float temperature;
  float min_p;
};
