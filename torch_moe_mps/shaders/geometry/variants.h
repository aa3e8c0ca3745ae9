// Matmuls by other kernels, which the tuner compares with the planned ones
#pragma once

GEOMETRY kVariantRows = 4;        // rows of a group of lanes, for one token
GEOMETRY kVariantSimdgroups = 4;  // of a threadgroup, the most
GEOMETRY kVariantBuffers = 2;     // of inputs, for prompts
