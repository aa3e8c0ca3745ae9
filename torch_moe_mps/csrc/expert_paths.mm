#include "expert_paths.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "encoder.h"
#include "kernel_names.h"
#include "routing.h"
#include "rows.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr int64_t kMaxFewTokens = 32;
constexpr int64_t kCombineThreads = 256;

enum class Path { kSingle, kFew, kGemm };  // kSingle serves everything, slowly for many tokens

// The kernels for 2 to 32 tokens. Rows are those of a simdgroup in the first, of a threadgroup in the second.
struct FewKernels {
  const char* rows_kernel;
  int64_t rows, simdgroups;
  bool has_long_units;  // see UnitBlocks in shaders/expert_rows_matrix.h
  const char* down_kernel;
  int64_t down_rows, down_simdgroups;
  int64_t max_pairs;
};
constexpr FewKernels kDots{"expert_rows_few", kFewRows, kFewSimdgroups, false,
                           "expert_down_few", kFewRows, kFewSimdgroups, kMaxFewPairs};
constexpr FewKernels kMatrices{"expert_rows_matrix", kMatrixRows,     kMatrixSimdgroups,     true,
                               "expert_down_matrix", kMatrixDownRows, kMatrixDownSimdgroups, kMaxMatrixPairs};
constexpr FewKernels kParts{"expert_rows_matrix", kMatrixRows,     kMatrixSimdgroups, true,
                            "expert_down_parts",  kMatrixDownRows, kPartsSimdgroups,  kMaxMatrixPairs};

// Whether at least two simdgroups of the down projection can share an expert. An expert counts for each
// kMatrixPairsAtOnce of its pairs; there is a simdgroup for each.
bool down_in_parts(const ExpertMatrix& matrix, int64_t pairs) {
  const int64_t experts = std::min(pairs, matrix.experts);
  const int64_t most = experts + (pairs - experts) / kMatrixPairsAtOnce;
  return 2 * experts <= kPartsSimdgroups && most <= kPartsSimdgroups;
}

const FewKernels& few_kernels(const ExpertMatrix& matrix, int64_t pairs) {
  if (matrix.bits == 0) return kDots;
  return down_in_parts(matrix, pairs) ? kParts : kMatrices;
}

// The only place that chooses, from shapes and formats alone. Measured by translation on an NVIDIA H200, E
// 128, K 8, 2048 -> 2 x 768 -> 2048, both matmuls, for 32 tokens: dense bfloat16 375 us in decode, 586 us and
// the sorting in prefill; int4 125 and 419 us. For 64 tokens decode's list of pairs and its terms would no
// longer fit beside each other in threadgroup memory. Dense dot products reach 78 to 94 % of a copy: they are
// left as they are. For mxfp4 a matrix element takes more instructions than an affine one, by count as many
// as the dot products of three pairs.
Path path_for(const Tensor& ids, const ExpertMatrix& matrix, bool transposed) {
  const int64_t tokens = ids.size(0), pairs = ids.numel();
  if (tokens == 1) return Path::kSingle;
  // The kernels for 2 to 32 tokens walk along the rows of a matrix, which a transposed one does not have.
  const bool few = tokens <= kMaxFewTokens && pairs <= few_kernels(matrix, pairs).max_pairs;
  if (few && !transposed) return Path::kFew;
  return matrix.experts <= kMaxBuckets ? Path::kGemm : Path::kSingle;
}

std::string kernel_of(const char* base, const ExpertMatrix& matrix, c10::ScalarType dtype) {
  return matrix.format[0] == '\0' ? kernel_name(base, {dtype}) : kernel_name(base, {matrix.format, dtype});
}

// Groups of 32 have matrix kernels of their own.
std::string few_kernel_of(const char* base, const ExpertMatrix& matrix, c10::ScalarType dtype) {
  if (matrix.bits != 0 && matrix.group_shift == 5) {
    return kernel_name(base, {matrix.format, "groups32", dtype});
  }
  return kernel_of(base, matrix, dtype);
}

int64_t outputs_of(int64_t rows, const Activation& activation) {
  return activation.row_layout == ROWS_PLAIN ? rows : rows / 2;
}

bool rows_aligned(const Tensor& x, const ExpertMatrix& matrix) {
  return matrix.inputs % 8 == 0 && is_aligned(x) && is_aligned(matrix.packed);
}

ExpertParams matmul_params(const Tensor& x, const ExpertMatrix& matrix, const Tensor& ids,
                           const Activation& activation, bool x_per_pair) {
  ExpertParams params{};
  params.tokens = ids.size(0);
  params.slots = ids.size(1);
  params.pairs = ids.numel();
  params.experts = matrix.experts;
  params.inputs = matrix.inputs;
  params.rows = matrix.rows;
  params.outputs = outputs_of(matrix.rows, activation);
  params.vectorised = rows_aligned(x, matrix);
  params.bits = matrix.bits;
  params.group_shift = matrix.group_shift;
  params.wide_ids = ids.scalar_type() == at::kLong;
  params.x_per_pair = x_per_pair;
  params.grid_is_experts = ids.numel() > matrix.experts;
  params.row_layout = activation.row_layout;
  params.activation = activation.kind;
  params.has_bias = matrix.bias.has_value();
  params.bias_dtype = matrix.bias ? dtype_code(*matrix.bias) : DTYPE_FLOAT;
  params.alpha = activation.alpha;
  params.limit = activation.limit;
  return params;
}

ExpertDownParams down_params(const ExpertParams& matmul, const ExpertSum& sum) {
  ExpertDownParams params{};
  params.matmul = matmul;
  params.combine.weights_dtype = dtype_code(sum.weights);
  params.combine.has_gate = sum.shared_gate.has_value();
  params.combine.gate_dtype = sum.shared_gate ? dtype_code(*sum.shared_gate) : DTYPE_FLOAT;
  params.combine.gate_is_logit = sum.gate_is_logit;
  params.combine.has_shared = sum.shared_out.has_value();
  params.combine.has_residual = sum.residual.has_value();
  return params;
}

Command& bind_matrix(Command& command, const Tensor& x, const ExpertMatrix& matrix) {
  return command.bind(x).bind(matrix.packed).bind(matrix.scales).bind(matrix.biases);
}

Command& bind_sum(Command& command, const ExpertSum& sum) {
  return command.bind(sum.weights)
      .bind_or(sum.shared_gate, sum.weights)
      .bind_or(sum.shared_out, sum.weights)
      .bind_or(sum.residual, sum.weights);
}

// The grid of the first dispatch for 2 to 32 tokens: blocks of rows of each unit and of one for the
// sentinels. Two blocks for several pairs take so long that they would end last in a short grid, or with
// float activations (129 instead of 99 us on an NVIDIA H200, 8 tokens).
Size few_grid(const FewKernels& few, bool is_float, ExpertParams& params) {
  const int64_t blocks = ceil_div(params.rows, few.simdgroups * few.rows);
  const int64_t units = std::min<int64_t>(params.pairs, params.experts);
  if (!few.has_long_units) return {NSUInteger(blocks), NSUInteger(units + 1)};
  const bool has_long = !is_float && units * blocks >= 2 * kLastBlocks;
  const int64_t others = has_long ? std::min(units, ceil_div(kLastBlocks, blocks)) : units;
  const int64_t last = others < units ? ceil_div(kHalvedBlocks, blocks) + 1 : 0;  // with the sentinels'
  params.long_units = units - others;
  params.middle_units = others + 1 - last;
  return {NSUInteger(ceil_div(blocks, 2)),
          NSUInteger(params.long_units + 2 * params.middle_units + 4 * last)};
}

// Decode's first dispatch: the rows of each pair's expert. `order` gets the pairs by expert, for decode_down.
void decode_rows(Commands& commands, Path path, const Tensor& x, const ExpertMatrix& matrix,
                 const Tensor& ids, const Activation& activation, bool x_per_pair, const Tensor& out,
                 const Tensor& order) {
  ExpertParams params = matmul_params(x, matrix, ids, activation, x_per_pair);
  const char* single = matrix.transposed ? "expert_columns_single" : "expert_rows_single";
  const FewKernels& few = few_kernels(matrix, ids.numel());
  const Size grid = path == Path::kFew ? few_grid(few, x.scalar_type() == at::kFloat, params) : Size{1};
  const std::string kernel = path == Path::kFew ? few_kernel_of(few.rows_kernel, matrix, x.scalar_type())
                                                : kernel_of(single, matrix, x.scalar_type());
  Command& command = commands.add(matrix.library, kernel);
  bind_matrix(command, x, matrix).bind(ids).bind_or(matrix.bias, ids).bind(out).params(params);
  const int64_t outputs = params.outputs;
  if (path == Path::kFew) {
    command.bind(order).threadgroups(grid, {NSUInteger(few.simdgroups * kSimdWidth)});
  } else if (matrix.transposed) {
    command.threadgroups({NSUInteger(ceil_div(outputs, kSimdWidth)), params.pairs},
                         {NSUInteger(kColumnSimdgroups * kSimdWidth)});
  } else {
    const int64_t block = outputs_of(kSingleSimdgroups * kSingleRows, activation);
    command.threadgroups({NSUInteger(ceil_div(outputs, block)), params.pairs},
                         {NSUInteger(kSingleSimdgroups * kSimdWidth)});
  }
}

// Decode's second dispatch: down, the weighted sum, shared expert and residual.
void decode_down(Commands& commands, Path path, const Tensor& x, const ExpertMatrix& matrix,
                 const Tensor& ids, const ExpertSum& sum, const Tensor& out, const Tensor& order) {
  const ExpertDownParams params = down_params(matmul_params(x, matrix, ids, Activation{}, true), sum);
  const char* single = matrix.transposed ? "expert_down_columns_single" : "expert_down_single";
  const FewKernels& few = few_kernels(matrix, ids.numel());
  const std::string kernel = path == Path::kFew ? few_kernel_of(few.down_kernel, matrix, x.scalar_type())
                                                : kernel_of(single, matrix, x.scalar_type());
  Command& command = commands.add(matrix.library, kernel);
  bind_matrix(command, x, matrix).bind(ids).bind_or(matrix.bias, ids).bind(out);
  bind_sum(command, sum).params(params);
  if (path == Path::kFew) {
    command.bind(order)
        .threadgroup_memory(params.matmul.pairs * (few.down_rows + 1) * sizeof(float))
        .threadgroups({NSUInteger(ceil_div(matrix.rows, few.down_rows))},
                      {NSUInteger(few.down_simdgroups * kSimdWidth)});
  } else if (matrix.transposed) {
    command.threadgroups({NSUInteger(ceil_div(matrix.rows, kSimdWidth)), params.matmul.tokens},
                         {NSUInteger(kColumnSimdgroups * kSimdWidth)});
  } else {
    const int64_t simdgroups = std::min<int64_t>(params.matmul.slots, kSingleSimdgroups);
    command.threadgroups({NSUInteger(ceil_div(matrix.rows, kSingleRows)), params.matmul.tokens},
                         {NSUInteger(simdgroups * kSimdWidth)});
  }
}

// A stack without elements, of no experts or no inputs. The kernels for one token serve any number of them:
// they read none of it, but the biases of experts without inputs.
bool is_empty(const ExpertMatrix& matrix) {
  return matrix.packed.numel() == 0;
}

// No empty buffer can be bound: `any` is one that is not.
ExpertMatrix without_weights(ExpertMatrix matrix, const Tensor& any) {
  matrix.packed = matrix.scales = matrix.biases = any;
  if (matrix.bias && matrix.bias->numel() == 0) matrix.bias.reset();
  return matrix;
}

int64_t tile_columns(const ExpertMatrix& matrix, const Activation& activation) {
  return ceil_div(outputs_of(matrix.rows, activation), outputs_of(kTileColumns, activation));
}

// The pairs by expert and the tiles of both matmuls.
struct Tiles {
  Tensor pair_order, offsets;
  TileList list;
};

Tiles add_tiles(Commands& commands, const Tensor& ids, int64_t experts, int64_t columns_a, int64_t columns_b,
                bool sentinel_tiles) {
  const auto ints = ids.options().dtype(at::kInt);
  const int64_t pairs = ids.numel();
  Tiles tiles{at::empty({pairs}, ints), at::empty({experts + 1}, ints),
              TileList{at::empty({max_tiles(pairs, experts, kTileRows), 4}, ints), at::empty({6}, ints),
                       kTileRows, columns_a, columns_b, sentinel_tiles}};
  add_bucket(commands, ids, experts, tiles.pair_order, tiles.offsets, tiles.list);
  return tiles;
}

// One matmul over the tiles, with as many threadgroups as there are. `grid` is its place in the list's grids.
void add_gemm(Commands& commands, const Tiles& tiles, int64_t grid, const Tensor& x,
              const ExpertMatrix& matrix, const Tensor& ids, const Activation& activation, bool x_per_pair,
              const Tensor& out) {
  const char* base = matrix.transposed ? "expert_gemm_transposed" : "expert_gemm";
  Command& command = commands.add(matrix.library, kernel_of(base, matrix, x.scalar_type()));
  bind_matrix(command, x, matrix)
      .bind_or(matrix.bias, ids)
      .bind(out)
      .bind(tiles.pair_order)
      .bind(tiles.list.tiles)
      .params(matmul_params(x, matrix, ids, activation, x_per_pair))
      .indirect(tiles.list.grids, 3 * grid, {NSUInteger(kGemmThreads)});
}

void add_combine(Commands& commands, const Tensor& slots, const ExpertMatrix& matrix, const Tensor& ids,
                 const ExpertSum& sum, const Tensor& out) {
  Command& command = commands.add("combine", kernel_name("expert_combine", {out.scalar_type()}));
  command.bind(slots).bind(ids);
  bind_sum(command, sum)
      .bind(out)
      .params(down_params(matmul_params(slots, matrix, ids, Activation{}, true), sum))
      .threadgroups(
          {NSUInteger(ceil_div(matrix.rows, kCombineThreads * kCombineColumns)), NSUInteger(ids.size(0))},
          {NSUInteger(kCombineThreads)});
}

}  // namespace

Activation activation_of(std::string_view name, std::optional<double> alpha, std::optional<double> limit,
                         bool gated, bool interleaved) {
  constexpr std::pair<std::string_view, uint32_t> kKinds[] = {{"silu", ACTIVATION_SILU},
                                                              {"gelu", ACTIVATION_GELU},
                                                              {"gelu_tanh", ACTIVATION_GELU_TANH},
                                                              {"relu", ACTIVATION_RELU},
                                                              {"relu2", ACTIVATION_RELU2},
                                                              {"swiglu_oai", ACTIVATION_SWIGLU_OAI},
                                                              {"silu_clamped", ACTIVATION_SILU_CLAMPED}};
  Activation activation;
  for (const auto& [known, kind] : kKinds) {
    if (known == name) activation.kind = kind;
  }
  TORCH_CHECK(activation.kind != ACTIVATION_NONE, "moe_mps: no kernel for activation ", name);
  activation.alpha = static_cast<float>(alpha.value_or(1.702));
  activation.limit = static_cast<float>(limit.value_or(7.0));
  if (gated) activation.row_layout = interleaved ? ROWS_INTERLEAVED : ROWS_HALVES;
  return activation;
}

bool is_aligned(const Tensor& tensor) {
  return tensor.storage_offset() * tensor.element_size() % 16 == 0;
}

Tensor aligned(const Tensor& tensor) {
  const Tensor rows = tensor.contiguous();
  return is_aligned(rows) ? rows : rows.clone();
}

void warn_of_copy(const Tensor& weight) {
  TORCH_WARN_ONCE("moe_mps: a stack of experts of shape ", weight.sizes(), ", strides ", weight.strides(),
                  " and offset ", weight.storage_offset(),
                  " is copied in every call; keep the weights contiguous, packed ones on 16 bytes");
}

Tensor project_slots(const Tensor& x_, const ExpertMatrix& matrix, const Tensor& ids_) {
  Tensor out = at::empty({ids_.size(0), ids_.size(1), matrix.rows}, x_.options());
  if (out.numel() == 0) return out;
  const Tensor x = aligned(x_), ids = ids_.contiguous();
  const bool x_per_pair = x.dim() == 3;
  Commands commands;
  if (is_empty(matrix)) {
    const Tensor& any = out;
    decode_rows(commands, Path::kSingle, any, without_weights(matrix, any), ids, Activation{}, x_per_pair,
                out, Tensor());
    commands.encode();
    return out;
  }
  const Path path = path_for(ids, matrix, matrix.transposed);
  Tensor order;
  Tiles tiles;
  if (path == Path::kGemm) {
    tiles = add_tiles(commands, ids, matrix.experts, tile_columns(matrix, Activation{}), 1, true);
    add_gemm(commands, tiles, 0, x, matrix, ids, Activation{}, x_per_pair, out);
  } else {
    if (path == Path::kFew) order = at::empty({ids.numel(), 4}, ids.options().dtype(at::kInt));
    decode_rows(commands, path, x, matrix, ids, Activation{}, x_per_pair, out, order);
  }
  commands.encode();
  return out;
}

Tensor apply_experts(const Tensor& x_, const ExpertMatrix& gate_up, const ExpertMatrix& down,
                     const Tensor& ids_, const Activation& activation, const ExpertSum& sum) {
  Tensor out = at::empty(x_.sizes(), x_.options());
  if (out.numel() == 0) return out;
  const Tensor x = aligned(x_), ids = ids_.contiguous();
  Commands commands;
  if (is_empty(down)) {  // and so is gate_up
    decode_down(commands, Path::kSingle, x, without_weights(down, x), ids, sum, out, Tensor());
    commands.encode();
    return out;
  }
  const Path path = path_for(ids, gate_up, gate_up.transposed || down.transposed);
  const Tensor hidden = at::empty({ids.numel(), down.inputs}, x.options());
  Tensor order, slots;
  Tiles tiles;
  if (path == Path::kGemm) {
    slots = at::empty({ids.numel(), down.rows}, x.options());
    tiles = add_tiles(commands, ids, gate_up.experts, tile_columns(gate_up, activation),
                      tile_columns(down, Activation{}), false);
    add_gemm(commands, tiles, 0, x, gate_up, ids, activation, false, hidden);
    add_gemm(commands, tiles, 1, hidden, down, ids, Activation{}, true, slots);
    add_combine(commands, slots, down, ids, sum, out);
  } else {
    if (path == Path::kFew) order = at::empty({ids.numel(), 4}, ids.options().dtype(at::kInt));
    decode_rows(commands, path, x, gate_up, ids, activation, false, hidden, order);
    decode_down(commands, path, hidden, down, ids, sum, out, order);
  }
  commands.encode();
  return out;
}

}  // namespace moe_mps
