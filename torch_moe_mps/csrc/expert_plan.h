// How the experts run: a pure function from shapes to dispatches. Benchmarks, traces and the cost model see
// the same plan, through `torch.ops.moe_mps._plan`.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bucket.h"
#include "metal/encoder.h"

namespace moe_mps {

// What a step reads and writes.
enum class ExpertWork {
  kBucket,   // ids -> pairs by expert, tiles
  kFirst,    // x -> hidden: the first matmul, or the only one
  kSecond,   // hidden -> output: the second matmul and the sum over a token's experts
  kSlots,    // hidden -> slots: the second matmul alone
  kCombine,  // slots -> output
};

struct ExpertStep {
  ExpertWork work;
  std::string kernel;  // without the suffix of its library
  Size grid{0};
  int64_t indirect = -1;  // which of the grids that kBucket computes, in place of `grid`
  int64_t threads = 0;
  int64_t memory = 0;  // bytes of threadgroup memory
};

struct ExpertShape {
  int64_t tokens, slots, experts;
  int64_t rows, outputs;  // of the first matrix, and of one pair after the activation
  int64_t columns = 0;    // outputs of the second matmul; 0: there is none
  bool first_transposed = false, second_transposed = false;
  bool empty = false;  // matrices without elements: kernels that read none
  int64_t pairs() const { return tokens * slots; }
};

struct ExpertPlan {
  std::vector<ExpertStep> steps;
  bool lists_pairs = false;  // the first matmul's kernel finds the pairs of an expert by itself
  BucketTiles tiles;         // of kBucket
};

ExpertPlan plan_experts(const ExpertShape& shape);

// A linear layer: one matrix for all tokens, in one dispatch. `shares_rows`: dot products of the format take
// two tokens at a time.
ExpertStep plan_linear(int64_t tokens, int64_t rows, int64_t outputs, bool shares_rows);

}  // namespace moe_mps
