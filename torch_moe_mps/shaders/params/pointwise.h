// Formulas of elements
#pragma once

#define POINTWISE_INPUTS 6
#define POINTWISE_STEPS 32
#define POINTWISE_NUMBERS 12
#define POINTWISE_RANK 4
// dtypes of inputs behind those above
#define DTYPE_INT 3
#define DTYPE_LONG 4
#define DTYPE_NONE 5  // an input that is not given
// An operand: an input, the result of a step, or a number
#define POINTWISE_FIRST_STEP POINTWISE_INPUTS
#define POINTWISE_FIRST_NUMBER (POINTWISE_INPUTS + POINTWISE_STEPS)

// Operations, in the order of ops/families/pointwise.py
#define POINTWISE_TO 0
#define POINTWISE_NEG 1
#define POINTWISE_EXP 2
#define POINTWISE_LOG 3
#define POINTWISE_LOG1P 4
#define POINTWISE_SQRT 5
#define POINTWISE_RSQRT 6
#define POINTWISE_SIGMOID 7
#define POINTWISE_SILU 8
#define POINTWISE_SOFTPLUS 9
#define POINTWISE_TANH 10
#define POINTWISE_RELU 11
#define POINTWISE_COS 12
#define POINTWISE_SIN 13
#define POINTWISE_ADD 14
#define POINTWISE_SUB 15
#define POINTWISE_MUL 16
#define POINTWISE_DIV 17
#define POINTWISE_MAX 18
#define POINTWISE_MIN 19

struct PointwiseStep {
  uint8_t operation;
  uint8_t x;
  uint8_t y;
  uint8_t dtype;  // of the result
};

struct PointwiseParams {
  uint32_t sizes[POINTWISE_RANK];
  uint32_t strides[POINTWISE_INPUTS][POINTWISE_RANK];  // in elements; 0 where an input is broadcast
  uint32_t count;                                      // elements of the result
  uint32_t terms;  // of a mean, whose dimension is the last but one and has size 1 above
  uint32_t steps;
  uint8_t dtypes[8];  // of inputs
  PointwiseStep code[POINTWISE_STEPS];
  float numbers[POINTWISE_NUMBERS];
};
