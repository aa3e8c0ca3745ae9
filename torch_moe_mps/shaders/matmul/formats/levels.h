// GGUF's formats of levels.
#pragma once
#include "matmul/formats/grid.h"
#include "matmul/formats/small_scales.h"
#include "matmul/formats/typed_scales.h"

// level * scale, of ggml's 16 levels. A byte has two codes: it is the number of their point.
template <typename T, typename Scales>
struct LevelCodes {
  typedef T Element;
  typedef PackedRows<4, Scales::kUnit> Rows;
  typedef typename Rows::Row Row;
  static constant constexpr int kValues = 32, kTileValues = 16, kPackSize = 4, kGroups = 1;
  static constant constexpr int kPlaceBytes = Scales::kPlaceBytes;
  static constant constexpr bool kAnyLength = false;

  template <int N>
  struct Chunk {
    vec<uint, N / 8> words;  // as Words, LLVM holds them in 64 bits and in 32 at once
    typename Scales::Loaded scales;
  };

  Rows rows;
  Scales scales;

  LevelCodes(device const uchar* packed, device const uchar* scales_, device const uchar* biases, uint expert,
             constant MatmulParams& params)
      : rows(packed, expert, params), scales(scales_, biases, rows.first_unit) {}

  Row row(uint number) const { return rows.row(number); }
  template <int N>
  Chunk<N> load(Row row, uint column, uint) const {
    device const uint* words = rows.words + (row.word + column / 8);
    return {*reinterpret_cast<device const vec<uint, N / 8>*>(words),
            scales.template load<N>(row.unit, column)};
  }

  static FragmentElement place_of(int value) { return {value / 2, value % 2}; }
  template <int N>
  static half2 levels(Chunk<N> chunk, int number) {
    return as_type<half2>(kGrid.words[chunk.words[number / 4] >> (number % 4 * 8) & 0xff]);
  }

  static Pack<kPackSize> codes(Chunk<kValues> chunk, int pack) {
    Pack<kPackSize> result;
    UNROLL for (int i = 0; i < kPackSize / 2; ++i) {
      const half2 two = levels(chunk, pack * kPackSize / 2 + i);
      result.v[2 * i] = float(two.x);
      result.v[2 * i + 1] = float(two.y);
    }
    return result;
  }
  static void add_inputs(Pack<kPackSize>, thread InputSums&) {}
  static float excess(InputSums) { return 0.0f; }
  static void add_dot(Chunk<kValues> chunk, int, float dot, InputSums, thread float& total) {
    total = fma(Scales::template of<true>(chunk.scales, 0).scale, dot, total);
  }

  template <int N>
  static float2 values(Chunk<N> chunk, int number) {
    const half2 two = levels(chunk, number);
    const float scale = Scales::template of<false>(chunk.scales, 0).scale;
    return float2(float(two.x) * scale, float(two.y) * scale);
  }
};
