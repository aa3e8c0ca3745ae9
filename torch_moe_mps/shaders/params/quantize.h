#pragma once

// Strides are in elements; importance has one row an expert.
struct QuantizeParams {
  uint64_t expert_stride;
  uint64_t row_stride;
  uint64_t importance_stride;
  uint32_t rows;
  uint32_t parts;  // of a row: each is a thread's
  uint32_t lanes;  // that share a group
  uint32_t bits;   // of an affine code
};
