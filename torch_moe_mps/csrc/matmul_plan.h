// How matmuls run: pure functions from shapes and the GPU's cores to dispatches. Benchmarks, traces and the
// cost model see the same plan, through `torch.ops.moe_mps._plan` and `_plan_linear`.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bucket.h"
#include "metal/encoder.h"

namespace moe_mps {

// Operands of a step.
enum class MatmulWork {
  kBucket,   // ids -> pairs by expert, tiles
  kFirst,    // x -> hidden: the first matmul, or the only one
  kSecond,   // hidden -> output: the second matmul and the sum over a token's experts
  kDown,     // hidden -> a row for each pair: only the second matmul
  kCombine,  // those rows -> output
};

// What the kernels of a file are for: one token, one token with a norm or a router in front, a few tokens,
// prompts, prompts on tensor units; and what the tuner compares with some of these.
enum class KernelsOf { kToken, kJoined, kFew, kPrompts, kTensorUnits, kVariants };

struct MatmulStep {
  MatmulWork work;
  std::string kernel;  // without the suffix of its library
  Size grid{0};
  int64_t threads = 0;
  int64_t memory = 0;     // bytes of threadgroup memory
  int64_t indirect = -1;  // at least 0: the number of the grid, computed by kBucket, that replaces `grid`
  KernelsOf kernels = KernelsOf::kToken;
  int64_t blocks = 0;          // blocks of rows, one a simdgroup; 0: the grid does not depend on simdgroups
  bool shares_inputs = false;  // the simdgroups of a threadgroup share the inputs of the same rows
  bool norms_inputs = false;   // the kernel norms its inputs; without it they have to come normed
};

// Norms of the inputs that a kernel may apply: none, those with a weight in the dtype of the inputs, those
// with one in float32 beside 16 bits.
enum class InputNorms { kNone, kNarrow, kWide };

struct MatmulShape {
  int64_t tokens, top_k, experts;
  int64_t rows, outputs;                 // rows of the first matrix; outputs of one pair after the activation
  int64_t columns = 0;                   // outputs of the second matmul; 0: there is none
  InputNorms norms = InputNorms::kNone;  // of the first matmul
  bool chosen = false;                   // the first matmul chooses the experts, of one token
  bool shared = false;                   // with a pair more, the shared expert's
  bool empty = false;                    // the matrices have no elements, and the kernels must read none
  bool first_on_tensor_units = false, second_on_tensor_units = false;  // where there are enough pairs
  int64_t pairs() const { return tokens * top_k; }
};

struct MatmulPlan {
  std::vector<MatmulStep> steps;
  bool lists_pairs = false;  // the first matmul's kernel lists the pairs of each expert
  BucketTiles tiles;         // made by kBucket
};

// Whether so many pairs are multiplied on tensor units where a matrix can be.
bool pays_on_tensor_units(int64_t pairs, int64_t experts);

MatmulPlan plan_experts(const MatmulShape& shape, int64_t cores);

// A linear layer: one matrix for all tokens, in one dispatch. With `tensor_units`, many tokens are multiplied
// there.
MatmulStep plan_linear(int64_t tokens, int64_t rows, int64_t inputs, int64_t outputs, int64_t cores,
                       bool tensor_units, InputNorms norms = InputNorms::kNone);

// Launches of a step that give the same bits are numbered: by the simdgroups of a threadgroup, each of which
// has rows or pairs of its own, and beyond kVariant by those of its kernel's variant.
constexpr int64_t kVariant = 100;

// The numbers of a step; the planned one first. Dense weights have no variants.
std::vector<int64_t> launches_of(const MatmulStep& step, bool quantised);

// The step with the launch of a number, as it is where that is not among those.
MatmulStep with_launch(MatmulStep step, int64_t number, bool quantised);

}  // namespace moe_mps
