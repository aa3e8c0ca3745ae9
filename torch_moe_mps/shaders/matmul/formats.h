// The formats of a matrix behind one interface, for kernels that read its rows.
//
// A chunk is N consecutive values of a row. A lane takes chunks of W::kValues values for dot products, with
// W::kGroups scales for as many equal parts, and of W::kTileValues for tiles:
//
//   row(number)                         Row: where a row begins
//   load<N>(row, column, left)          Chunk<N>: its bits and scales; `left` values remain to the row's end
//   codes(chunk, pack)                  Pack<kPackSize>: kPackSize of its codes, as floats
//   excess(sums)                        float: what codes() adds to the dot product of codes and inputs
//   add_dot(chunk, group, dot, sums,    adds the dot product of a group's values and inputs, from that of its
//           total)                      codes and inputs
//   values(chunk, number)               float2: the two values that a lane has in a fragment of a tile
//   place_of(value)                     FragmentElement: which fragment, and which of the two
//
// codes() may add a constant to integer codes; `sums` of the inputs are what add_inputs() collected. An
// expert's address takes 64 bits, an index within its matrix 32.
//
// matmul/formats/ has a file for each kind: a library reads that of its own format.
#pragma once
#include "common/packs.h"
#include "matmul/common.h"

// N elements of a dense row; elements from `left` on are zero.
template <typename T, int N>
struct Elements {
  static constant constexpr int kPerWord = 4 / sizeof(T);
  Words<N / kPerWord> words;

  float at(int i) const {
    if constexpr (sizeof(T) == 4) {
      return as_type<float>(words.v[i]);
    } else {
      return float(as_type<vec<T, 2>>(words.v[i / 2])[i % 2]);
    }
  }
};

inline uint word_of(float2 pair) {
  return as_type<uint>(pair.x);
}
inline uint word_of(half2 pair) {
  return as_type<uint>(pair);
}
inline uint word_of(bfloat2 pair) {
  return as_type<uint>(pair);
}

template <int N, typename T>
inline Elements<T, N> load_elements(device const T* source, uint left, bool vectorised) {
  constexpr int kPerWord = Elements<T, N>::kPerWord;
  Elements<T, N> elements = {};
  if (vectorised) {
    elements.words = load_words<N / kPerWord>(reinterpret_cast<device const uint*>(source));
    return elements;
  }
  UNROLL for (int i = 0; i < N / kPerWord; ++i) {
    vec<T, 2> pair = vec<T, 2>(T(0.0f));
    UNROLL for (int j = 0; j < kPerWord; ++j) {
      if (uint(kPerWord * i + j) < left) pair[j] = source[kPerWord * i + j];
    }
    elements.words.v[i] = word_of(pair);
  }
  return elements;
}

// Sums of the inputs, one for each constant that is added to the codes they meet.
struct InputSums {
  float v[2];
};

// Where a value of a chunk goes: the number of a fragment, and `element` 0 or 1 of the lane's two in it.
struct FragmentElement {
  int number, element;
};

// Puts values in order that were computed in pairs. A pair is computed whole and taken apart only here:
// otherwise LLVM splits its computation into operations on 16 bits.
template <int kCount, typename Codes, typename Pair>
inline Pack<kCount> in_order(thread const Pair* pairs) {
  Pack<kCount> pack;
  UNROLL for (int i = 0; i < kCount; ++i) {
    const FragmentElement place = Codes::place_of(i);
    pack.v[i] = float(pairs[place.number][place.element]);
  }
  return pack;
}

// The format that decodes without a rounding error; that of integer codes is another one.
template <typename W>
struct ExactFormat {
  typedef W type;
};
