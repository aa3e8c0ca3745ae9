#include "matmul_plan.h"

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "../shaders/geometry.h"
#include "metal/function.h"

namespace moe_mps {
namespace {

constexpr int64_t kCombineThreads = 256;  // not tuned
// From this many pairs of an expert on average, matrix products pay: a product takes eight pairs, a dot
// product one. By the cost model (tests/simulator/apple), int4 on an M1 Max.
constexpr int64_t kManyPairs = 6;

// From this many tokens of a linear layer, matrix products pay. By the cost model, 4096 x 4096 on an M4 Max,
// issue cycles a MAC of dot products and of matrix products at 4 tokens: int4 2.3 and 3.0, int6 2.8 and 3.2.
constexpr int64_t kManyTokens = 5;

// From this many pairs of an expert on average, tensor units are used, which multiply 16 pairs at a time;
// from the second number, their tiles have kLargeTilePairs pairs: a tile decodes its weights once. Untuned:
// see docs/speed.md.
constexpr int64_t kTensorPairs = 16;
constexpr int64_t kLargeTensorPairs = 64;

// Up to so many experts a lane has 8 of those that it chooses among, else 16. By the cost model, the choice
// adds 10 % to the instructions of Qwen3-30B-A3B's product and 16 % to DeepSeek-V3's, int4 on an M1 Max, both
// of which memory limits by a third; with 16 a lane, 19 and 28 %, and 65 registers instead of 45.
constexpr int64_t kFewChosenExperts = 256;

// Threadgroups a core that hide the latency of loads. With fewer, the simdgroups of a threadgroup share the
// inputs of the same rows, which takes more threadgroups of fewer steps. By the cost model: 4096 x 4096 in
// int4 for 8 tokens takes 48 to 52 us instead of 67 to 152 on an M1 Max.
constexpr int64_t kGroupsOfCore = 4;

// Simdgroups a core that keep memory busy for one token. Where rows make fewer, kFewSimdgroups share the
// inputs of some, if there are as many as kLongInputs: each has two chunks or more. By the cost model, 4,096
// inputs of 2,048 rows in int4 take 10 us instead of 12 to 17 on an M4 Max, and 7 instead of 10 to 18 on an
// M3 Ultra.
constexpr int64_t kSimdgroupsOfCore = 12;
constexpr int64_t kLongInputs = 2048;

enum class Path { kRows, kFew, kGemm };  // kRows serves everything, slowly for many tokens

Path path_for(const MatmulShape& shape) {
  if (shape.tokens == 1 || shape.empty) return Path::kRows;
  if (shape.pairs() <= kMaxFewPairs && shape.pairs() < kManyPairs * shape.experts) return Path::kFew;
  return shape.experts <= kMaxBuckets ? Path::kGemm : Path::kRows;
}

// The number of outputs of `rows` rows of the first matrix.
int64_t outputs_of_rows(const MatmulShape& shape, int64_t rows) {
  return rows * shape.outputs / shape.rows;
}

bool fills(int64_t threadgroups, int64_t cores) {
  return threadgroups >= kGroupsOfCore * cores;
}

// Few pairs: a threadgroup takes as many rows as leave enough threadgroups for the GPU.
MatmulStep few_step(const MatmulShape& shape, int64_t grid_rows, int64_t cores) {
  constexpr int64_t kRows = kRowGroupsOfSimdgroup * kFewRows;  // a simdgroup's
  const int64_t threads = kFewSimdgroups * kSimdWidth;
  const int64_t of_rows = ceil_div(shape.outputs, outputs_of_rows(shape, kRows));
  const int64_t whole = ceil_div(of_rows, kFewSimdgroups);
  const bool splits = !fills(whole * grid_rows, cores);
  const Size grid{splits ? of_rows : whole, grid_rows};
  const char* kernel = splits ? "matmul_rows_few_split" : "matmul_rows_few";
  MatmulStep step{MatmulWork::kFirst, kernel, grid, threads};
  step.kernels = KernelsOf::kFew;
  step.shares_inputs = splits;
  if (!splits) step.blocks = of_rows;
  return step;
}

MatmulStep first_step(const MatmulShape& shape, Path path, int64_t cores) {
  if (path == Path::kFew) return few_step(shape, std::min(shape.pairs(), shape.experts) + 1, cores);
  constexpr int64_t kRows = kRowGroupsOfSimdgroup * kSingleRows;  // a simdgroup's
  const int64_t of_rows = ceil_div(shape.outputs, outputs_of_rows(shape, kRows));
  const Size grid{ceil_div(of_rows, kSingleSimdgroups), shape.pairs() + shape.shared};
  MatmulStep step{MatmulWork::kFirst, "matmul_rows", grid, kSingleSimdgroups * kSimdWidth};
  step.blocks = of_rows;
  // For one token memory limits the kernel, so a norm in each simdgroup costs less than a launch.
  step.norms_inputs = shape.norms != InputNorms::kNone && shape.tokens == 1;
  if (shape.chosen) {
    step.kernel = c10::str("matmul_rows_chosen", shape.experts <= kFewChosenExperts ? 8 : 16);
  } else if (step.norms_inputs) {
    step.kernel = "matmul_rows_normed";
  }
  if (step.norms_inputs && shape.norms == InputNorms::kWide) step.kernel += "_wide";
  if (shape.chosen || step.norms_inputs) step.kernels = KernelsOf::kJoined;
  return step;
}

// A threadgroup for each block of rows; the number of its simdgroups decides the order of sums.
void share_inputs(MatmulStep& step) {
  step.shares_inputs = true;
  step.grid.x = std::exchange(step.blocks, 0);
  step.threads = kFewSimdgroups * kSimdWidth;
}

MatmulStep second_step(const MatmulShape& shape, Path path) {
  if (path == Path::kFew) {
    const Size grid{ceil_div(shape.columns, kFewDownRows)};
    const int64_t memory = shape.pairs() * kFewDownRows * static_cast<int64_t>(sizeof(float));
    MatmulStep step{MatmulWork::kSecond, "expert_down_few", grid, kDownThreads, memory};
    step.kernels = KernelsOf::kFew;
    return step;
  }
  const Size grid{ceil_div(shape.columns, kRowGroupsOfSimdgroup * kSingleRows), shape.tokens};
  const int64_t simdgroups = std::min<int64_t>(shape.top_k, kDownSimdgroups) + shape.shared;
  return {MatmulWork::kSecond, "expert_down", grid, simdgroups * kSimdWidth};
}

bool is_down(const MatmulStep& step) {
  return step.kernel == "expert_down";
}

// The simdgroups of a threadgroup with which the tuner tries the other kernel of a pair; none: there is none.
std::vector<int64_t> simdgroups_of_variant(const MatmulStep& step) {
  const bool of_token = step.kernels == KernelsOf::kToken || step.kernels == KernelsOf::kJoined;
  // Among more experts a lane of the variant would need too many registers.
  const bool rows = of_token && step.blocks > 0 && !step.kernel.starts_with("matmul_rows_chosen16");
  if (rows || is_down(step)) return {2, kVariantSimdgroups};
  if (step.kernel == c10::str("gemm", kTilePairs)) return {kGemmSimdgroups};
  return {};
}

MatmulStep variant_of(MatmulStep step) {
  if (is_down(step)) {
    step.blocks = step.grid.x;
  } else if (step.blocks > 0) {
    step.blocks = ceil_div(step.blocks, kVariantRows / kSingleRows);
  }
  step.kernel += "_variant";
  step.kernels = KernelsOf::kVariants;
  return step;
}

// A matrix product; the caller adds the grid.
MatmulStep gemm_step(MatmulWork work, int64_t tile_pairs, bool on_tensor_units) {
  MatmulStep step{work, c10::str("gemm", tile_pairs, on_tensor_units ? "_tensor" : "")};
  step.threads = on_tensor_units ? kTensorThreads : kGemmSimdgroups * kSimdWidth;
  step.kernels = on_tensor_units ? KernelsOf::kTensorUnits : KernelsOf::kPrompts;
  return step;
}

MatmulPlan plan_gemm(const MatmulShape& shape) {
  const bool pays = pays_on_tensor_units(shape.pairs(), shape.experts);
  const bool first_on_units = pays && shape.first_on_tensor_units;
  const bool second_on_units = pays && shape.second_on_tensor_units;
  const bool all_on_units = first_on_units && (second_on_units || shape.columns == 0);
  const bool large = all_on_units && shape.pairs() >= kLargeTensorPairs * shape.experts;
  const int64_t tile_pairs = large ? kLargeTilePairs : kTilePairs;
  const auto product = [&](MatmulWork work, bool on_units, int64_t grid) {
    MatmulStep step = gemm_step(work, tile_pairs, on_units);
    step.indirect = grid;
    return step;
  };
  const auto rows = [](bool on_units) { return on_units ? kTensorRows : kGemmRows; };
  MatmulPlan plan;
  plan.tiles.pairs = tile_pairs;
  plan.tiles.columns_a = ceil_div(shape.outputs, outputs_of_rows(shape, rows(first_on_units)));
  plan.tiles.columns_b = shape.columns > 0 ? ceil_div(shape.columns, rows(second_on_units)) : 1;
  plan.tiles.sentinels = shape.columns == 0;
  const BucketLaunch bucket = bucket_launch(shape.pairs(), shape.experts);
  plan.steps.push_back({MatmulWork::kBucket, "bucket_pairs", bucket.grid, bucket.threads, bucket.memory});
  plan.steps.push_back(product(MatmulWork::kFirst, first_on_units, 0));
  if (shape.columns == 0) return plan;
  plan.steps.push_back(product(MatmulWork::kDown, second_on_units, 1));
  const Size grid{ceil_div(shape.columns, kCombineThreads * kCombineColumns), shape.tokens};
  plan.steps.push_back({MatmulWork::kCombine, "expert_combine", grid, kCombineThreads});
  return plan;
}

}  // namespace

std::vector<int64_t> launches_of(const MatmulStep& step, bool quantised) {
  const int64_t planned = step.threads / kSimdWidth;
  const int64_t most = step.blocks > 0 ? 8 : step.work == MatmulWork::kSecond ? planned : 0;
  std::vector<int64_t> numbers = {planned};
  for (int64_t number = 1; number <= most; number *= 2) {
    if (number != planned) numbers.push_back(number);
  }
  if (quantised) {
    for (const int64_t number : simdgroups_of_variant(step)) numbers.push_back(kVariant + number);
  }
  return numbers;
}

MatmulStep with_launch(MatmulStep step, int64_t number, bool quantised) {
  const std::vector<int64_t> numbers = launches_of(step, quantised);
  if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) return step;
  if (number > kVariant) step = variant_of(std::move(step));
  const int64_t simdgroups = number % kVariant;
  step.threads = simdgroups * kSimdWidth;
  if (step.blocks > 0) step.grid.x = ceil_div(step.blocks, simdgroups);
  return step;
}

bool pays_on_tensor_units(int64_t pairs, int64_t experts) {
  return pairs >= kTensorPairs * experts;
}

MatmulPlan plan_experts(const MatmulShape& shape, int64_t cores) {
  const Path path = path_for(shape);
  if (path == Path::kGemm) return plan_gemm(shape);
  MatmulPlan plan;
  plan.lists_pairs = path == Path::kFew;
  if (!shape.empty || shape.columns == 0) plan.steps.push_back(first_step(shape, path, cores));
  if (shape.columns > 0) plan.steps.push_back(second_step(shape, path));
  return plan;
}

MatmulStep plan_linear(int64_t tokens, int64_t rows, int64_t inputs, int64_t outputs, int64_t cores,
                       bool tensor_units, InputNorms norms) {
  MatmulShape shape{tokens, 1, 1, rows, outputs};
  shape.norms = norms;
  if (tensor_units && pays_on_tensor_units(tokens, 1)) {
    const int64_t across = ceil_div(outputs, outputs_of_rows(shape, kTensorRows));
    const bool large =
        tokens >= kLargeTensorPairs && fills(across * ceil_div(tokens, kLargeTilePairs), cores);
    const int64_t tile_pairs = large ? kLargeTilePairs : kTilePairs;
    MatmulStep step = gemm_step(MatmulWork::kFirst, tile_pairs, true);
    step.grid = {across, ceil_div(tokens, tile_pairs)};
    return step;
  }
  if (tokens == 1) {
    MatmulStep step = first_step(shape, Path::kRows, cores);
    if (inputs >= kLongInputs && step.blocks < kSimdgroupsOfCore * cores) share_inputs(step);
    return step;
  }
  if (tokens < kManyTokens) return few_step(shape, 1, cores);
  const int64_t across = ceil_div(outputs, outputs_of_rows(shape, kGemmRows)),
                tiles = ceil_div(tokens, kTilePairs);
  if (tiles > 1 && fills(across * tiles, cores)) {
    MatmulStep step = gemm_step(MatmulWork::kFirst, kTilePairs, false);
    step.grid = {across, tiles};
    return step;
  }
  MatmulStep step = gemm_step(MatmulWork::kFirst, kSplitTilePairs, false);
  step.kernel += "_split";
  step.grid = {ceil_div(outputs, outputs_of_rows(shape, kGemmRows / kGemmSimdgroups)),
               ceil_div(tokens, kSplitTilePairs)};
  step.shares_inputs = true;
  return step;
}

namespace {

// Kernel, threadgroups (or which grid of the first dispatch), threads, threadgroup memory.
std::string line_of(const MatmulStep& step) {
  std::string line = step.kernel + " grid ";
  line += step.indirect >= 0 ? c10::str("of tiles, ", step.indirect)
                             : c10::str(step.grid.x, "x", step.grid.y, "x", step.grid.z);
  line += c10::str(" of ", step.threads);
  if (step.memory > 0) line += c10::str(" with ", step.memory, " bytes");
  if (step.shares_inputs) line += ", inputs split";
  return line;
}

std::string linear_line(int64_t tokens, int64_t rows, bool gated, int64_t cores, bool tensor_units,
                        int64_t inputs, bool normed) {
  const InputNorms norms = normed ? InputNorms::kNarrow : InputNorms::kNone;
  return line_of(plan_linear(tokens, rows, inputs, gated ? rows / 2 : rows, cores, tensor_units, norms));
}

// A line a dispatch.
std::vector<std::string> plan_lines(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden,
                                    int64_t intermediate, bool gated, int64_t cores, bool tensor_units) {
  MatmulShape shape{tokens, top_k, experts, gated ? 2 * intermediate : intermediate, intermediate, hidden};
  shape.first_on_tensor_units = shape.second_on_tensor_units = tensor_units;
  std::vector<std::string> lines;
  for (const MatmulStep& step : plan_experts(shape, cores).steps) lines.push_back(line_of(step));
  return lines;
}

}  // namespace
}  // namespace moe_mps

MOE_FUNCTION("_plan(int tokens, int top_k, int experts, int hidden, int intermediate, bool gated=True, "
             "int cores=16, bool tensor_units=False) -> str[]",
             plan_lines)
MOE_FUNCTION("_plan_linear(int tokens, int rows, bool gated=False, int cores=16, bool tensor_units=False, "
             "int inputs=4096, bool normed=False) -> str",
             linear_line)
