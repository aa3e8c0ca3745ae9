// Causal depthwise convolution with a state
#pragma once

GEOMETRY kConvThreads = 64;
GEOMETRY kConvTokens = 8;  // of a thread, at least
