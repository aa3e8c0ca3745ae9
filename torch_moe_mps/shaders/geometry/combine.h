// Combine
#pragma once

GEOMETRY kSiluThreads = 128;
GEOMETRY kActivationThreads = 128;
GEOMETRY kSumNormThreads = 384;
