// Where the codes of a row are.
#pragma once
#include "matmul/formats.h"

// Rows of kBits-bit codes, the first value in the lowest bits, with scales for each kUnit values.
template <int kBits, int kUnit>
struct PackedRows {
  struct Row {
    uint word, unit;
  };

  device const uint* words;
  ulong first_unit;  // of the matrix
  uint words_per_row, units_per_row;

  PackedRows(device const uchar* packed, uint expert, constant MatmulParams& params)
      : words_per_row(params.inputs / 16 * kBits / 2), units_per_row(params.inputs / kUnit) {
    const ulong row = ulong(expert) * params.rows;
    words = reinterpret_cast<device const uint*>(packed) + row * words_per_row;
    first_unit = row * units_per_row;
  }

  Row row(uint number) const { return {number * words_per_row, number * units_per_row}; }
  // The words of N values from `column` on, which is a multiple of N: their bits fill words.
  template <int N>
  Words<N * kBits / 32> load(Row row, uint column) const {
    return load_words<N * kBits / 32>(words + (row.word + column / 16 * kBits / 2));
  }
};
