// How scales and biases of affine formats are searched; ops/families/quantize.py reads the numbers here.
#pragma once

// The first scale is 1 - kStart / 2^bits of the range, for codes of up to 4 bits and of more. Each move
// multiplies the best scale so far by 1 + x / 2^bits, and adds y times that scale to the bias; least squares
// follow. The moves were chosen one by one on matrices of SmolLM2. There the error is 1.03 to 1.04 times that
// of the best of 90 starts at 3 to 5 bits, 1.18 and 1.25 times at 6 and 8, where MLX's rule has 2.5 to 4.2.
constant constexpr float kStart[2] = {0.9f, 0.8f};
constant constexpr uint kMoves = 10;
constant constexpr float kMove[2][kMoves][2] = {{{0.0f, 0.0f},
                                                 {-0.8f, 0.25f},
                                                 {0.4f, 0.0f},
                                                 {-0.8f, -0.25f},
                                                 {-0.4f, 0.0f},
                                                 {0.8f, 0.25f},
                                                 {0.0f, 0.0f},
                                                 {0.8f, -0.5f},
                                                 {0.4f, 0.0f},
                                                 {-1.2f, -0.5f}},
                                                {{0.0f, 0.0f},
                                                 {2.0f, -0.5f},
                                                 {0.5f, 0.0f},
                                                 {-0.5f, 0.0f},
                                                 {2.0f, 0.0f},
                                                 {0.0f, 0.0f},
                                                 {-1.5f, 0.25f},
                                                 {-1.0f, -0.25f},
                                                 {0.5f, 0.0f},
                                                 {-0.5f, 0.0f}}};

// Each weight of a group counts as much as this share of their mean importance at least: nothing else bounds
// the error of those that multiply nothing.
constant constexpr float kLeastShare[1] = {0.001f};
// Least difference of the product of two sums that is not rounding.
constant constexpr float kSmallest[1] = {0.00001f};
