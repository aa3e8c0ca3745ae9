// A formula of elements. A thread takes an element and walks through the steps, which are the same for all.
// Results lie in threadgroup memory, a column for each thread, because registers have no numbers.
#pragma once
#include "common/activations.h"
#include "common/dtypes.h"
#include "geometry/pointwise.h"
#include "params/pointwise.h"

inline float load_number(device const uchar* source, uint dtype, ulong index) {
  if (dtype == DTYPE_INT) return float(reinterpret_cast<device const int*>(source)[index]);
  if (dtype == DTYPE_LONG) return float(reinterpret_cast<device const long*>(source)[index]);
  return load_one(source, dtype, index);
}

inline float rounded(float x, uint dtype) {
  return dtype == DTYPE_HALF ? float(half(x)) : dtype == DTYPE_BFLOAT ? float(bfloat(x)) : x;
}

// log(1 + x) without losing small x: x / (u - 1) undoes the rounding of u = 1 + x.
inline float log_plus_1(float x) {
  const float u = 1.0f + x;
  if (u == 1.0f) return x;
  return isinf(u) ? precise::log(u) : precise::log(u) * (x / (u - 1.0f));
}

inline float operate(uint operation, float x, float y) {
  switch (operation) {
    case POINTWISE_NEG: return -x;
    case POINTWISE_EXP: return precise::exp(x);
    case POINTWISE_LOG: return precise::log(x);
    case POINTWISE_LOG1P: return log_plus_1(x);
    case POINTWISE_SQRT: return precise::sqrt(x);
    case POINTWISE_RSQRT: return precise::rsqrt(x);
    case POINTWISE_SIGMOID: return sigmoid(x);
    case POINTWISE_SILU: return silu(x);
    case POINTWISE_SOFTPLUS: return softplus(x);
    case POINTWISE_TANH: return precise::tanh(x);
    case POINTWISE_RELU: return x < 0.0f ? 0.0f : x;
    case POINTWISE_COS:  // of angles of millions of radians, too, where fast functions are wrong
      return precise::cos(x);
    case POINTWISE_SIN: return precise::sin(x);
    case POINTWISE_ADD: return x + y;
    case POINTWISE_SUB: return x - y;
    case POINTWISE_MUL: return x * y;
    case POINTWISE_DIV: return x / y;
    case POINTWISE_MAX:  // NaN, of either, stays
      return isnan(y) || x < y ? y : x;
    case POINTWISE_MIN: return isnan(y) || x > y ? y : x;
    default: return x;
  }
}

inline float operand(uint place, constant PointwiseParams& params, threadgroup const float* values) {
  if (place >= POINTWISE_FIRST_NUMBER) return params.numbers[place - POINTWISE_FIRST_NUMBER];
  return values[place * kPointwiseThreads];
}

template <typename T>
[[kernel]] void pointwise(device const uchar* a [[buffer(0)]], device const uchar* b [[buffer(1)]],
                          device const uchar* c [[buffer(2)]], device const uchar* d [[buffer(3)]],
                          device const uchar* e [[buffer(4)]], device const uchar* f [[buffer(5)]],
                          device T* output [[buffer(6)]], constant PointwiseParams& params [[buffer(7)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float all[POINTWISE_FIRST_NUMBER * kPointwiseThreads];
  threadgroup float* values = all + thread_index;
  const ulong element = ulong(group) * kPointwiseThreads + thread_index;
  if (element >= params.count) return;
  uint rest = uint(element), place[POINTWISE_RANK];
  UNROLL for (int dim = POINTWISE_RANK - 1; dim >= 0; --dim) {
    place[dim] = rest % params.sizes[dim];
    rest /= params.sizes[dim];
  }
  device const uchar* const inputs[POINTWISE_INPUTS] = {a, b, c, d, e, f};
  float total = 0.0f;
  for (uint term = 0; term < params.terms; ++term) {
    UNROLL for (uint i = 0; i < POINTWISE_INPUTS; ++i) {
      if (params.dtypes[i] != DTYPE_NONE) {
        ulong index = ulong(term) * params.strides[i][POINTWISE_RANK - 2];
        UNROLL for (uint dim = 0; dim < POINTWISE_RANK; ++dim) index +=
            ulong(place[dim]) * params.strides[i][dim];
        values[i * kPointwiseThreads] = load_number(inputs[i], params.dtypes[i], index);
      }
    }
    float result = 0.0f;
    for (uint i = 0; i < params.steps; ++i) {
      const PointwiseStep step = params.code[i];
      const float x = operand(step.x, params, values);
      const float y = operand(step.y, params, values);
      result = rounded(operate(step.operation, x, y), step.dtype);
      values[(POINTWISE_FIRST_STEP + i) * kPointwiseThreads] = result;
    }
    total = term == 0 ? result : total + result;
  }
  output[element] = T(total / float(params.terms));
}
