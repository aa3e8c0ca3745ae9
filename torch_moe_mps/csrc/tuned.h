// Launches that selfcheck/tuner.py has found faster on this GPU than the planned ones, of those that give the
// same bits.
#pragma once
#include "matmul_run.h"

namespace moe_mps {

// The step as it runs for this matrix and so many pairs. Asked wherever one is encoded, so that what was
// captured before the table changes follows it.
MatmulStep tuned(MatmulStep step, const MatrixStack& matrix, int64_t pairs);

}  // namespace moe_mps
