// Norms
#pragma once

#define SCALAR_NONE 0
#define SCALAR_SINGLE 1
#define SCALAR_PER_COLUMN 2

struct NormParams {
  uint64_t input_stride;  // elements between the starts of two rows of the input
  uint32_t rows;
  uint32_t width;
  uint32_t simdgroups_per_row;
  uint32_t vectorised;  // every row starts on a multiple of 4 elements
  uint32_t has_weight;
  uint32_t weight_dtype;
  uint32_t scalar_kind;
  uint32_t scalar_dtype;
  uint32_t write_sum;
  uint32_t groups;  // rows, one behind the other, that have weights of their own
  uint32_t gate_is_sigmoid;
  uint32_t gate_first;
  float eps;
  float weight_offset;
  float factor;  // of the norm alone, or of the input that is added to a residual
};
