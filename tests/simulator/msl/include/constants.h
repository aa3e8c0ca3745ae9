// The scalar types, macros and enumerations of metal_stdlib, for the executor, CUDA and the strict check.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

#ifndef METAL_FUNC  // CUDA has its own
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#endif
#define HUGE_VALF INFINITY
#define MAXFLOAT 0x1.fffffep127f
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define HALF_MAX half(0x1.ffcp15f)
#define HALF_MIN half(0x1.0p-14f)
#define HALF_EPSILON half(0x1.0p-10f)
#define MAXHALF HALF_MAX
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-127 - 1)
#define UCHAR_MAX (127 * 2 + 1)
#define SHRT_MAX 32767
#define SHRT_MIN (-32767 - 1)
#define USHRT_MAX (32767 * 2 + 1)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX (2147483647 * 2U + 1)
#define LONG_MAX 9223372036854775807
#define LONG_MIN (-9223372036854775807 - 1)
#define ULONG_MAX (9223372036854775807 * 2UL + 1)
#define M_E_F 2.71828182845904523536028747135266250f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LOG10E_F 0.434294481903251827651128918916605082f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LN10_F 2.30258509299404568401799145468436421f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_PI_4_F 0.785398163397448309615660845819875721f
#define M_1_PI_F 0.318309886183790671537767526745028724f
#define M_2_PI_F 0.636619772367581343075535053490057448f
#define M_2_SQRTPI_F 1.12837916709551257389615890312154517f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
enum memory_order { memory_order_relaxed };
namespace precise = ::metal;
#ifndef __CUDACC_RTC__  // which has functions of its own there
namespace fast = ::metal;
#endif
}  // namespace metal
