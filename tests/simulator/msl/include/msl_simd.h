// Barriers, simdgroup and quadgroup functions. Every lane of a simdgroup hands in its operands; when all have
// arrived, one of them computes every lane's result (the executor's msl_simd_operation).
#pragma once
#include "msl_atomic.h"

namespace msl {
typedef const void* const* lane_values;
typedef void* const* lane_results;
#define MSL_COMBINE __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))

// Simdgroup functions take 8 to 32 bit numbers and vectors of them. A bfloat goes as a float, and a float
// comes back.
template <class T>
inline constexpr bool is_simd_type =
    (is_int<T> && sizeof(T) <= 4) || std::is_same_v<T, half> || std::is_same_v<T, float>;
template <class T, int N>
inline constexpr bool is_simd_type<metal::vec<T, N>> = is_simd_type<T>;
template <class T>
using if_simd = std::enable_if_t<is_simd_type<T>, T>;

template <class T>
MSL_COMBINE const T& lane_value(lane_values values, unsigned lane) {
  return *static_cast<const T*>(values[lane]);
}

template <class V, class R>
MSL_RUNTIME R collective(const char* name, V value, msl_combine combine, const char* file, unsigned line) {
  R result;
  msl_simd_operation(name, &value, &result, combine, file, line);
  return result;
}

// Reductions combine neighbours at growing distance, as a butterfly of shuffles does; lanes that do not exist
// are left out.
template <class T, class Operation, unsigned Width>
struct reduction {
  MSL_COMBINE static const char* combine(lane_values values, lane_results results) {
    for (unsigned base = 0; base < 32; base += Width) {
      T sums[Width];
      bool exists[Width];
      for (unsigned i = 0; i < Width; i++) {
        exists[i] = values[base + i];
        if (exists[i]) sums[i] = lane_value<T>(values, base + i);
      }
      for (unsigned step = 1; step < Width; step *= 2)
        for (unsigned i = 0; i + step < Width; i += 2 * step)
          if (exists[i + step])
            sums[i] = exists[i] ? Operation::apply(sums[i], sums[i + step]) : sums[i + step];
      for (unsigned i = 0; i < Width; i++)
        if (results[base + i]) *static_cast<T*>(results[base + i]) = sums[0];
    }
    return nullptr;
  }
};

template <class T, class Operation, bool Inclusive>
struct prefix {
  MSL_COMBINE static const char* combine(lane_values values, lane_results results) {
    T total = Operation::template start<T>();
    for (unsigned i = 0; i < 32; i++) {
      if (!values[i]) continue;
      T next = Operation::apply(total, lane_value<T>(values, i));
      *static_cast<T*>(results[i]) = Inclusive ? next : total;
      total = next;
    }
    return nullptr;
  }
};

#define MSL_REDUCTION(name, expression, identity) \
  struct name {                                   \
    template <class T>                            \
    MSL_COMBINE static T apply(T a, T b) {        \
      return T(expression);                       \
    }                                             \
    template <class T>                            \
    MSL_COMBINE static T start() {                \
      return T(identity);                         \
    }                                             \
  };
// clang-format off
MSL_REDUCTION(op_sum, a + b, 0)
MSL_REDUCTION(op_product, a * b, 1)
MSL_REDUCTION(op_min, metal::min(a, b), 0)
MSL_REDUCTION(op_max, metal::max(a, b), 0)
MSL_REDUCTION(op_and, a & b, 0)
MSL_REDUCTION(op_or, a | b, 0)
MSL_REDUCTION(op_xor, a ^ b, 0)
// clang-format on

// A shuffle: each lane names the lane it reads, or keeps its own or its filling value.
template <class T>
struct shuffled {
  T value, filling;
  int operand, modulo;
};
enum class shuffle { direct, up, down, exclusive_or, rotate_up, rotate_down, fill_up, fill_down, uniform };

template <class T, shuffle Kind, unsigned Width>
struct shuffling {
  MSL_COMBINE static const char* combine(lane_values values, lane_results results) {
    int common = -1;
    for (int i = 0; i < 32; i++) {
      if (!values[i]) continue;
      const auto& lane = lane_value<shuffled<T>>(values, i);
      const int base = i / int(Width) * int(Width), within = i - base, width = int(Width);
      int source = within;
      bool fill = false;
      if constexpr (Kind == shuffle::direct || Kind == shuffle::uniform) source = lane.operand;
      if constexpr (Kind == shuffle::uniform) {
        if (common >= 0 && common != lane.operand) return "the lanes name different lanes to broadcast from";
        common = lane.operand;
      }
      if constexpr (Kind == shuffle::exclusive_or) source = within ^ lane.operand;
      if constexpr (Kind == shuffle::up) source = within - lane.operand < 0 ? within : within - lane.operand;
      if constexpr (Kind == shuffle::down)
        source = within + lane.operand >= width ? within : within + lane.operand;
      if constexpr (Kind == shuffle::rotate_up) source = (within - lane.operand) & (width - 1);
      if constexpr (Kind == shuffle::rotate_down) source = (within + lane.operand) & (width - 1);
      if constexpr (Kind == shuffle::fill_up || Kind == shuffle::fill_down) {
        const int part = within / lane.modulo * lane.modulo, at = within - part;
        source = Kind == shuffle::fill_up ? at - lane.operand : at + lane.operand;
        fill = source < 0 || source >= lane.modulo;
        source = part + (source & (lane.modulo - 1));
      }
      char* to = static_cast<char*>(results[i]);
      const void* from = source >= 0 && source < width ? values[base + source] : nullptr;
      if (!from) {
        __builtin_memset(to, 0xff, sizeof(T));  // undefined in Metal: a NaN is seen where a zero would hide
      } else {
        const auto& other = *static_cast<const shuffled<T>*>(from);
        __builtin_memcpy(to, fill ? &other.filling : &other.value, sizeof(T));
      }
    }
    return nullptr;
  }
};

template <class T, shuffle Kind, unsigned Width>
MSL_RUNTIME T exchange(const char* name, T value, T filling, int operand, int modulo, const char* file,
                       unsigned line) {
  return collective<shuffled<T>, T>(name, {value, filling, operand, modulo},
                                    shuffling<T, Kind, Width>::combine, file, line);
}

template <unsigned Width>
struct voting {
  MSL_COMBINE static const char* combine(lane_values values, lane_results results) {
    uint64_t votes = 0, present = 0;
    for (unsigned i = 0; i < 32; i++) {
      if (!values[i]) continue;
      present |= 1ull << i;
      if (lane_value<bool>(values, i)) votes |= 1ull << i;
    }
    const uint64_t ones = (1ull << Width) - 1;
    for (unsigned i = 0; i < 32; i++) {
      const unsigned base = i / Width * Width;
      if (results[i]) {
        static_cast<uint64_t*>(results[i])[0] = votes >> base & ones;
        static_cast<uint64_t*>(results[i])[1] = present >> base & ones;
      }
    }
    return nullptr;
  }
};
struct votes {
  uint64_t given, present;
};
template <unsigned Width>
MSL_RUNTIME votes vote(const char* name, bool value, const char* file, unsigned line) {
  return collective<bool, votes>(name, value, voting<Width>::combine, file, line);
}
}  // namespace msl

namespace metal {
MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE_PARAMETERS) {
  msl_threadgroup_barrier(unsigned(flags), MSL_SITE);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE_PARAMETERS) {
  msl_simdgroup_barrier(unsigned(flags), MSL_SITE);
}

class simd_vote {
  uint64_t bits;

 public:
  typedef uint64_t vote_t;
  explicit simd_vote(vote_t v = 0) : bits(v) {}
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == 0xffffffffu; }
  bool any() const { return bits != 0; }
};
typedef simd_vote quad_vote;

// clang-format off
#define MSL_GROUP_LISTS(prefix_, Width) \
  MSL_GROUP_REDUCE(prefix_, sum, op_sum, Width) MSL_GROUP_REDUCE(prefix_, product, op_product, Width) \
  MSL_GROUP_REDUCE(prefix_, min, op_min, Width) MSL_GROUP_REDUCE(prefix_, max, op_max, Width)         \
  MSL_GROUP_REDUCE(prefix_, and, op_and, Width) MSL_GROUP_REDUCE(prefix_, or, op_or, Width)           \
  MSL_GROUP_REDUCE(prefix_, xor, op_xor, Width) MSL_GROUP_SHUFFLE(prefix_##_shuffle, direct, Width)   \
  MSL_GROUP_SHUFFLE(prefix_##_shuffle_up, up, Width)                                                  \
  MSL_GROUP_SHUFFLE(prefix_##_shuffle_down, down, Width)                                              \
  MSL_GROUP_SHUFFLE(prefix_##_shuffle_xor, exclusive_or, Width)                                       \
  MSL_GROUP_SHUFFLE(prefix_##_shuffle_rotate_up, rotate_up, Width)                                    \
  MSL_GROUP_SHUFFLE(prefix_##_shuffle_rotate_down, rotate_down, Width)                                \
  MSL_GROUP_SHUFFLE(prefix_##_broadcast, uniform, Width)                                              \
  MSL_GROUP_FILL(prefix_##_shuffle_and_fill_up, fill_up, Width)                                       \
  MSL_GROUP_FILL(prefix_##_shuffle_and_fill_down, fill_down, Width)
// clang-format on
#define MSL_GROUP_FUNCTIONS(prefix_, Width)                                                             \
  template <class T>                                                                                    \
  MSL_INLINE msl::if_simd<T> prefix_##_broadcast_first(T value, MSL_SITE_PARAMETERS) {                  \
    return msl::exchange<T, msl::shuffle::uniform, Width>(#prefix_ "_broadcast_first", value, value, 0, \
                                                          Width, MSL_SITE);                             \
  }                                                                                                     \
  MSL_INLINE bool prefix_##_any(bool value, MSL_SITE_PARAMETERS) {                                      \
    return msl::vote<Width>(#prefix_ "_any", value, MSL_SITE).given != 0;                               \
  }                                                                                                     \
  MSL_INLINE bool prefix_##_all(bool value, MSL_SITE_PARAMETERS) {                                      \
    const msl::votes v = msl::vote<Width>(#prefix_ "_all", value, MSL_SITE);                            \
    return v.given == v.present;                                                                        \
  }                                                                                                     \
  MSL_INLINE prefix_##_vote prefix_##_ballot(bool value, MSL_SITE_PARAMETERS) {                         \
    return prefix_##_vote(msl::vote<Width>(#prefix_ "_ballot", value, MSL_SITE).given);                 \
  }                                                                                                     \
  MSL_INLINE prefix_##_vote prefix_##_active_threads_mask(MSL_SITE_PARAMETERS) {                        \
    return prefix_##_vote(msl::vote<Width>(#prefix_ "_active_threads_mask", true, MSL_SITE).given);     \
  }

#define MSL_GROUP_REDUCE(prefix_, name, operation, Width)                                      \
  template <class T>                                                                           \
  MSL_INLINE msl::if_simd<T> prefix_##_##name(T value, MSL_SITE_PARAMETERS) {                  \
    return msl::collective<T, T>(#prefix_ "_" #name, value,                                    \
                                 msl::reduction<T, msl::operation, Width>::combine, MSL_SITE); \
  }                                                                                            \
  template <class T>                                                                           \
  MSL_INLINE msl::if_bfloat<T> prefix_##_##name(T value, MSL_SITE_PARAMETERS) {                \
    return prefix_##_##name(float(value), MSL_SITE);                                           \
  }
#define MSL_GROUP_SHUFFLE(name, kind, Width)                                                           \
  template <class T>                                                                                   \
  MSL_INLINE msl::if_simd<T> name(T value, ushort operand, MSL_SITE_PARAMETERS) {                      \
    return msl::exchange<T, msl::shuffle::kind, Width>(#name, value, value, operand, Width, MSL_SITE); \
  }                                                                                                    \
  template <class T>                                                                                   \
  MSL_INLINE msl::if_bfloat<T> name(T value, ushort operand, MSL_SITE_PARAMETERS) {                    \
    return name(float(value), operand, MSL_SITE);                                                      \
  }
#define MSL_GROUP_FILL(name, kind, Width)                                                                   \
  template <class T>                                                                                        \
  MSL_INLINE msl::if_simd<T> name(T value, msl::identity_t<T> filling, ushort delta, ushort modulo = Width, \
                                  MSL_SITE_PARAMETERS) {                                                    \
    return msl::exchange<T, msl::shuffle::kind, Width>(#name, value, filling, delta, modulo, MSL_SITE);     \
  }
// clang-format off
MSL_GROUP_LISTS(simd, 32)
MSL_GROUP_LISTS(quad, 4)
MSL_GROUP_FUNCTIONS(simd, 32)
MSL_GROUP_FUNCTIONS(quad, 4)
// clang-format on

#define MSL_PREFIX_SCAN(name, operation, inclusive)                                                \
  template <class T>                                                                               \
  MSL_INLINE msl::if_simd<T> name(T value, MSL_SITE_PARAMETERS) {                                  \
    return msl::collective<T, T>(#name, value, msl::prefix<T, msl::operation, inclusive>::combine, \
                                 MSL_SITE);                                                        \
  }
// clang-format off
MSL_PREFIX_SCAN(simd_prefix_inclusive_sum, op_sum, true)
MSL_PREFIX_SCAN(simd_prefix_exclusive_sum, op_sum, false)
MSL_PREFIX_SCAN(simd_prefix_inclusive_product, op_product, true)
MSL_PREFIX_SCAN(simd_prefix_exclusive_product, op_product, false)
// clang-format on

// Not collective: control flow is uniform wherever the executor accepts a simdgroup function, so the first
// lane is lane 0.
MSL_RUNTIME inline bool simd_is_first() {
  return msl_self->lane == 0;
}
MSL_RUNTIME inline bool quad_is_first() {
  return msl_self->lane % 4 == 0;
}
}  // namespace metal
