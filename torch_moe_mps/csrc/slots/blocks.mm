#include "blocks.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cstring>
#include <map>
#include <utility>

namespace moe_mps {
namespace {

using Byte = uint8_t;

template <typename T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void store(void* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// A number of `unit` bits in all parts of 64 bits.
constexpr uint64_t repeated(uint64_t number, int unit) {
  uint64_t result = 0;
  for (int shift = 0; shift < 64; shift += unit) result |= number << shift;
  return result;
}

// Eight codes of `bits` each, one in a byte, with no bits in between.
template <int bits>
inline uint64_t joined(uint64_t word) {
  constexpr uint64_t ones = repeated((1 << bits) - 1, 16);
  constexpr uint64_t twos = repeated((1 << 2 * bits) - 1, 32);
  constexpr uint64_t fours = (uint64_t(1) << 4 * bits) - 1;
  word = (word & ones) | (word >> (8 - bits) & ones << bits);
  word = (word & twos) | (word >> 2 * (8 - bits) & twos << 2 * bits);
  return (word & fours) | (word >> 4 * (8 - bits) & fours << 4 * bits);
}

// Codes of `bits` each, one in a byte, as a stream of bits with the lowest first.
template <int bits, int count>
inline void pack(const Byte* codes, Byte* to) {
  static_assert(count % 8 == 0);
  for (int eight = 0; eight < count / 8; ++eight) {
    const uint64_t word = joined<bits>(load<uint64_t>(codes + 8 * eight));
    std::memcpy(to + bits * eight, &word, bits);
  }
}

// Adds bits to codes that share the bytes of each run of `length`: those at 0, `bits`, 2 * `bits`, ... of
// each byte, which become the bits of the codes from `up` on.
template <int bits, int length, int count, int up = 0>
inline void add_runs(const Byte* from, Byte* codes) {
  constexpr int in_byte = 8 / bits;
  for (int run = 0; run < count / (length * in_byte); ++run)
    for (int part = 0; part < in_byte; ++part)
      for (int n = 0; n < length; ++n) {
        const int code = (from[run * length + n] >> part * bits & ((1 << bits) - 1)) << up;
        Byte& to = codes[(run * in_byte + part) * length + n];
        to = static_cast<Byte>(up == 0 ? code : to | code);
      }
}

// Nibbles of `length` bytes at a time, the lower ones first, whose pairs become bytes.
template <int length, int count>
inline void pairs(const Byte* from, Byte* to) {
  constexpr uint64_t lower = repeated(15, 8);
  for (int run = 0; run < count / 2; run += length)
    for (int n = 0; n < length; n += 8) {
      const auto word = load<uint64_t>(from + run + n);
      store(to + run + n / 2, static_cast<uint32_t>(joined<4>(word & lower)));
      store(to + run + (length + n) / 2, static_cast<uint32_t>(joined<4>(word >> 4 & lower)));
    }
}

// The places of the signs of eight values, for each byte of flags: that of value i is bit
// 16 (i % 2) + 4 (i / 2).
constexpr std::array<uint32_t, 256> kPlaces = [] {
  std::array<uint32_t, 256> places{};
  for (uint32_t flags = 0; flags < 256; ++flags)
    for (int i = 0; i < 8; ++i) places[flags] |= (flags >> i & 1) << (16 * (i % 2) + 4 * (i / 2));
  return places;
}();

// Flags of a sign for each of 32 values, in the order of the values, as codebook formats have them.
inline uint32_t spread(uint32_t flags) {
  return kPlaces[flags & 0xFF] | kPlaces[flags >> 8 & 0xFF] << 1 | kPlaces[flags >> 16 & 0xFF] << 2 |
         kPlaces[flags >> 24] << 3;
}

// Four times seven signs and four bits: each of these is behind seven signs.
inline uint32_t sevens(uint32_t word) {
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) result |= ((word >> 7 * n & 0x7F) | (word >> (28 + n) & 1) << 7) << 8 * n;
  return result;
}

// The points of eight times 32 values: the lower bytes of their numbers, and their signs by `signs(n)`.
template <int numbers, typename Signs>
inline void points(const Byte* from, int stride, Byte* to, Signs signs) {
  for (int n = 0; n < 8; ++n, to += numbers + 4) {
    std::memcpy(to, from + n * stride, numbers);
    store<uint32_t>(to + numbers, spread(signs(n)));
  }
}

// What follows are the types. Each has the bytes of a block and of its parts, and their conversion.

template <int halves>
struct Q4 {
  static constexpr int bytes = 2 * halves + 16, codes = 16, scales = 2, zeros = 2 * (halves - 1);
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    pairs<16, 32>(from + 2 * halves, c);
    std::memcpy(s, from, 2);
    std::memcpy(z, from + 2, zeros);
  }
};

template <int halves>
struct Q5 {
  static constexpr int bytes = 2 * halves + 20, codes = 20, scales = 2, zeros = 2 * (halves - 1);
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte values[32];
    add_runs<4, 16, 32>(from + 2 * halves + 4, values);
    add_runs<1, 1, 32, 4>(from + 2 * halves, values);
    pack<5, 32>(values, c);
    std::memcpy(s, from, 2);
    std::memcpy(z, from + 2, zeros);
  }
};

struct Q8_0 {
  static constexpr int bytes = 34, codes = 32, scales = 2, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    for (int n = 0; n < 32; ++n) c[n] = from[2 + n] ^ 128;
    std::memcpy(s, from, 2);
  }
};

// Codes that stay as they are: q1_0 and q2_0.
struct Same {
  static constexpr int bytes = 18, codes = 16, scales = 2, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    std::memcpy(c, from + 2, 16);
    std::memcpy(s, from, 2);
  }
};

struct Mxfp4 {
  static constexpr int bytes = 17, codes = 16, scales = 1, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    pairs<16, 32>(from + 1, c);
    *s = *from;
  }
};

// The sign of a scale is ignored, and the largest code is 0.
struct Nvfp4 {
  static constexpr int bytes = 36, codes = 32, scales = 4, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    pairs<8, 64>(from + 4, c);
    for (int n = 0; n < 4; ++n) s[n] = from[n] == 127 ? 0 : from[n] & 127;
  }
};

struct Q2K {
  static constexpr int bytes = 84, codes = 64, scales = 16, zeros = 4;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte values[256];
    add_runs<2, 32, 256>(from + 16, values);
    pack<2, 256>(values, c);
    std::memcpy(s, from, 16);
    std::memcpy(z, from + 80, 4);
  }
};

struct Q3K {
  static constexpr int bytes = 110, codes = 96, scales = 12, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte values[256], factors[16];
    add_runs<2, 32, 256>(from + 32, values);
    add_runs<1, 32, 256, 2>(from, values);
    pack<3, 256>(values, c);
    add_runs<4, 8, 16>(from + 96, factors);
    add_runs<2, 4, 16, 4>(from + 104, factors);
    pack<6, 16>(factors, s);
    std::memcpy(z, from + 108, 2);
  }
};

// The factors of eight scales and minima, alternating, in 6 bits each.
inline void pack_factors(const Byte* from, Byte* to) {
  Byte factors[16];
  for (int n = 0; n < 4; ++n) {
    const Byte low = from[n], minimum = from[4 + n], rest = from[8 + n];
    factors[2 * n] = low & 63;
    factors[2 * n + 1] = minimum & 63;
    factors[2 * n + 8] = static_cast<Byte>((rest & 15) | (low >> 2 & 48));
    factors[2 * n + 9] = static_cast<Byte>(rest >> 4 | (minimum >> 2 & 48));
  }
  pack<6, 16>(factors, to);
}

struct Q4K {
  static constexpr int bytes = 144, codes = 128, scales = 12, zeros = 4;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    pairs<32, 256>(from + 16, c);
    pack_factors(from + 4, s);
    std::memcpy(z, from, 4);
  }
};

struct Q5K {
  static constexpr int bytes = 176, codes = 160, scales = 12, zeros = 4;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte values[256];
    add_runs<4, 32, 256>(from + 48, values);
    add_runs<1, 32, 256, 4>(from + 16, values);
    pack<5, 256>(values, c);
    pack_factors(from + 4, s);
    std::memcpy(z, from, 4);
  }
};

struct Q6K {
  static constexpr int bytes = 210, codes = 192, scales = 16, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte values[256];
    add_runs<4, 64, 256>(from, values);
    add_runs<2, 32, 256, 4>(from + 128, values);
    pack<6, 256>(values, c);
    for (int n = 0; n < 16; ++n) s[n] = from[192 + n] ^ 128;
    std::memcpy(z, from + 208, 2);
  }
};

struct Iq4Xs {
  static constexpr int bytes = 136, codes = 128, scales = 6, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte factors[8];
    pairs<16, 256>(from + 8, c);
    add_runs<4, 1, 8>(from + 4, factors);
    add_runs<2, 1, 8, 4>(from + 2, factors);
    pack<6, 8>(factors, s);
    std::memcpy(z, from, 2);
  }
};

// Five digits of base 3 in a byte, as a fraction: the first is the largest third that it fits in.
template <int length, int digits>
inline Byte* add_digits(const Byte* from, Byte* to) {
  for (int n = 0; n < length; ++n) {
    int left = from[n];
    for (int digit = 0; digit < digits; ++digit, left = left * 3 & 255)
      to[digit * length + n] = static_cast<Byte>(left * 3 >> 8);
  }
  return to + length * digits;
}

struct Tq1 {
  static constexpr int bytes = 54, codes = 64, scales = 2, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    Byte values[256];
    Byte* rest = add_digits<16, 5>(from + 32, add_digits<32, 5>(from, values));
    add_digits<4, 4>(from + 48, rest);
    pack<2, 256>(values, c);
    std::memcpy(s, from + 52, 2);
  }
};

struct Tq2 {
  static constexpr int bytes = 66, codes = 64, scales = 2, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    Byte values[256];
    add_runs<2, 32, 256>(from, values);
    pack<2, 256>(values, c);
    std::memcpy(s, from + 64, 2);
  }
};

struct Iq1S {
  static constexpr int bytes = 50, codes = 32, scales = 16, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    std::memcpy(c, from + 2, 32);
    for (int n = 0; n < 8; ++n) {  // 12 bits of numbers, s, a shift
      const int word = load<uint16_t>(from + 34 + 2 * n);
      store(s + 2 * n, static_cast<uint16_t>((word >> 12 & 7) | (word & 0xFFF) << 3 | (word & 0x8000)));
    }
    std::memcpy(z, from, 2);
  }
};

struct Iq1M {
  static constexpr int bytes = 56, codes = 32, scales = 22, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    std::memcpy(c, from, 32);
    for (int n = 0; n < 8; ++n) {  // four times 3 bits of a number and a shift
      const int word = load<uint16_t>(from + 32 + 2 * n);
      int moved = 0;
      for (int k = 0; k < 4; ++k)
        moved |= (word >> 4 * k & 7) << 3 * k | (word >> (4 * k + 3) & 1) << (12 + k);
      store(s + 2 * n, static_cast<uint16_t>(moved));
    }
    uint64_t factors = 0;
    int half = 0;
    for (int n = 0; n < 4; ++n) {  // four times 3 bits of s, and four of the half
      const uint64_t word = load<uint16_t>(from + 48 + 2 * n);
      factors |= (word & 0xFFF) << 12 * n;
      half |= static_cast<int>(word >> 12) << 4 * n;
    }
    std::memcpy(s + 16, &factors, 6);
    store(z, static_cast<uint16_t>(half));
  }
};

struct Iq2Xxs {
  static constexpr int bytes = 66, codes = 64, scales = 2, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    points<4>(from + 2, 8, c, [&](int n) { return sevens(load<uint32_t>(from + 6 + 8 * n)); });
    std::memcpy(s, from, 2);
  }
};

struct Iq3Xxs {
  static constexpr int bytes = 98, codes = 96, scales = 2, zeros = 0;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte*) {
    points<8>(from + 2, 8, c, [&](int n) { return sevens(load<uint32_t>(from + 66 + 4 * n)); });
    std::memcpy(s, from, 2);
  }
};

struct Iq2Xs {
  static constexpr int bytes = 74, codes = 64, scales = 8, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    Byte numbers[32], signs[32];
    for (int n = 0; n < 32; ++n) {  // of 16 bits: nine of a number, seven signs
      const Byte high = from[3 + 2 * n];
      numbers[n] = from[2 + 2 * n];
      signs[n] = static_cast<Byte>(high >> 1 | high << 7);
    }
    points<4>(numbers, 4, c, [&](int n) { return load<uint32_t>(signs + 4 * n); });
    std::memcpy(s, from + 66, 8);
    std::memcpy(z, from, 2);
  }
};

struct Iq2S {
  static constexpr int bytes = 82, codes = 64, scales = 16, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    points<4>(from + 2, 4, c, [&](int n) { return load<uint32_t>(from + 34 + 4 * n); });
    for (int n = 0; n < 8; ++n) {
      s[2 * n] = from[74 + n];
      s[2 * n + 1] = from[66 + n];
    }
    std::memcpy(z, from, 2);
  }
};

struct Iq3S {
  static constexpr int bytes = 110, codes = 96, scales = 12, zeros = 2;
  static void convert(const Byte* from, Byte* c, Byte* s, Byte* z) {
    points<8>(from + 2, 8, c, [&](int n) { return load<uint32_t>(from + 74 + 4 * n); });
    for (int n = 0; n < 4; ++n) {  // 4 bits of s and 8 of numbers, twice
      const uint32_t factors = from[106 + n], low = from[66 + 2 * n], high = from[67 + 2 * n];
      const uint32_t moved = (factors & 15) | low << 4 | (factors >> 4) << 12 | high << 16;
      std::memcpy(s + 3 * n, &moved, 3);
    }
    std::memcpy(z, from, 2);
  }
};

template <typename Type>
void convert_blocks(const char* from, int64_t count, char* codes, char* scales, char* zeros) {
  for (int64_t n = 0; n < count; ++n) {
    Type::convert(reinterpret_cast<const Byte*>(from), reinterpret_cast<Byte*>(codes),
                  reinterpret_cast<Byte*>(scales), reinterpret_cast<Byte*>(zeros));
    from += Type::bytes;
    codes += Type::codes;
    scales += Type::scales;
    if (Type::zeros != 0) zeros += Type::zeros;
  }
}

template <typename From, typename To>
void convert_values(const char* from, int64_t count, char* codes, char*, char*) {
  for (int64_t n = 0; n < count; ++n, from += sizeof(From), codes += sizeof(To))
    store(codes, static_cast<To>(static_cast<float>(load<From>(from))));
}

template <typename Type>
constexpr BlockType blocks() {
  return {Type::bytes, Type::codes, Type::scales, Type::zeros, &convert_blocks<Type>};
}

template <typename From, typename To>
constexpr BlockType values() {
  return {sizeof(From), sizeof(To), 0, 0, &convert_values<From, To>};
}

template <typename From>
const BlockType* values_of(c10::ScalarType dtype) {
  static const BlockType wide = values<From, float>(), half = values<From, c10::Half>(),
                         brain = values<From, c10::BFloat16>();
  switch (dtype) {
    case c10::kFloat: return &wide;
    case c10::kHalf: return &half;
    case c10::kBFloat16: return &brain;
    default: return nullptr;
  }
}

}  // namespace

const BlockType* block_type(const std::string& name, c10::ScalarType dtype) {
  static const std::map<std::string, BlockType> types = {
      {"q4_0", blocks<Q4<1>>()},   {"q4_1", blocks<Q4<2>>()},  {"q5_0", blocks<Q5<1>>()},
      {"q5_1", blocks<Q5<2>>()},   {"q8_0", blocks<Q8_0>()},   {"q1_0", blocks<Same>()},
      {"q2_0", blocks<Same>()},    {"mxfp4", blocks<Mxfp4>()}, {"nvfp4", blocks<Nvfp4>()},
      {"q2_k", blocks<Q2K>()},     {"q3_k", blocks<Q3K>()},    {"q4_k", blocks<Q4K>()},
      {"q5_k", blocks<Q5K>()},     {"q6_k", blocks<Q6K>()},    {"iq4_nl", blocks<Q4<1>>()},
      {"iq4_xs", blocks<Iq4Xs>()}, {"tq1_0", blocks<Tq1>()},   {"tq2_0", blocks<Tq2>()},
      {"iq1_s", blocks<Iq1S>()},   {"iq1_m", blocks<Iq1M>()},  {"iq2_xxs", blocks<Iq2Xxs>()},
      {"iq2_xs", blocks<Iq2Xs>()}, {"iq2_s", blocks<Iq2S>()},  {"iq3_xxs", blocks<Iq3Xxs>()},
      {"iq3_s", blocks<Iq3S>()},
  };
  if (name == "f32") return values_of<float>(dtype);
  if (name == "f16") return values_of<c10::Half>(dtype);
  if (name == "bf16") return values_of<c10::BFloat16>(dtype);
  const auto found = types.find(name);
  return found == types.end() ? nullptr : &found->second;
}

}  // namespace moe_mps
