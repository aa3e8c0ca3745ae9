#include "matmul_run.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>

#include "bucket.h"
#include "formats.h"
#include "gpu.h"
#include "metal/work.h"
#include "tensor_units.h"
#include "tensors.h"
#include "tuned.h"

namespace moe_mps {
namespace {

using at::Tensor;

int64_t outputs_of(int64_t rows, const Activation& activation) {
  return activation.row_layout == ROWS_PLAIN ? rows : rows / 2;
}

// Whether a stack has no elements: no experts or no inputs.
bool is_empty(const MatrixStack& matrix) {
  return matrix.packed.numel() == 0;
}

// Metal binds no empty buffer, so the tensor `any` takes the place of empty ones. The kernels do not read it.
// A bias that has elements is kept: experts without inputs give their bias.
MatrixStack bindable(MatrixStack matrix, const Tensor& any) {
  if (!is_empty(matrix)) return matrix;
  matrix.packed = matrix.scales = matrix.zeros = any;
  if (matrix.bias && matrix.bias->numel() == 0) matrix.bias.reset();
  return matrix;
}

// Whether `pairs` pairs of this matrix's experts are multiplied on tensor units.
bool on_tensor_units(const MatrixStack& matrix, int64_t pairs) {
  return pays_on_tensor_units(pairs, matrix.experts) &&
         uses_tensor_units(tensor_units_library(matrix.library));
}

// Norms that a kernel of a matmul can apply to its inputs.
InputNorms norms_for(const std::optional<InputNorm>& norm, const Tensor& x, const MatrixStack& matrix) {
  if (!norm || !matrix.norms_inputs || !is_aligned(norm->weight)) return InputNorms::kNone;
  if (norm->weight.scalar_type() == x.scalar_type()) return InputNorms::kNarrow;
  return norm->weight.scalar_type() == at::kFloat ? InputNorms::kWide : InputNorms::kNone;
}

// Whether the kernel of the first matmul can choose the experts.
bool can_choose(const Router& router, const Tensor& x, const MatrixStack& matrix) {
  return x.size(0) == 1 && matrix.experts <= kMaxChosenExperts &&
         (router.params.wide_logits != 0 || router.logits.scalar_type() == matrix.library.dtype);
}

void set_norm(MatmulParams& params, const InputNorm& norm) {
  params.norm_eps = static_cast<float>(norm.eps);
  params.norm_weight_offset = static_cast<float>(norm.offset);
}

// Intermediate tensors that the steps of a plan hand to each other.
struct Run {
  const MatmulPlan& plan;
  const Tensor& ids;
  Buckets buckets;

  Run(const MatmulPlan& plan_, const Tensor& ids_, int64_t experts) : plan(plan_), ids(ids_) {
    const auto ints = ids.options().dtype(at::kInt);
    if (plan.lists_pairs) {
      buckets = {at::empty({ids.numel()}, ints), {}, at::empty({ids.numel(), 4}, ints)};
    } else if (plan.tiles.pairs > 0) {
      buckets = empty_buckets(ids.numel(), experts, ints, plan.tiles);
    }
  }

  void launch(Command& command, const MatmulStep& step) const {
    if (step.memory > 0) command.threadgroup_memory(step.memory);
    if (step.indirect >= 0) {
      command.indirect(buckets.grids, 3 * step.indirect, {step.threads});
    } else {
      command.threadgroups(step.grid, {step.threads});
    }
  }

  Command& bind_buckets(Command& command) const {
    return buckets.tiles.defined() ? command.bind(buckets.pair_order, buckets.tiles) : command;
  }
};

// The params that depend only on the matrix and the activation.
MatmulParams matrix_params(const Tensor& x, const MatrixStack& matrix, const Activation& activation) {
  MatmulParams params{};
  params.experts = matrix.experts;
  params.inputs = matrix.inputs;
  params.rows = matrix.rows;
  params.outputs = outputs_of(matrix.rows, activation);
  params.vectorised = matrix.inputs % 16 == 0 && is_aligned(x) && is_aligned(matrix.packed);
  params.row_layout = activation.row_layout;
  params.activation = activation.kind;
  params.activated = activation.activated > 0 ? activation.activated : params.outputs;
  params.factor = activation.factor;
  params.has_bias = matrix.bias.has_value();
  params.bias_dtype = dtype_code(matrix.bias);
  params.alpha = activation.alpha;
  params.limit = activation.limit;
  return params;
}

MatmulParams matmul_params(const Tensor& x, const MatrixStack& matrix, const Tensor& ids,
                           const Activation& activation, bool x_per_pair) {
  MatmulParams params = matrix_params(x, matrix, activation);
  params.tokens = ids.size(0);
  params.slots = ids.size(1);
  params.pairs = ids.numel();
  params.has_ids = 1;
  params.wide_ids = ids.scalar_type() == at::kLong;
  params.x_per_pair = x_per_pair;
  params.grid_by_expert = ids.numel() > matrix.experts;
  return params;
}

ExpertDownParams down_params(const Tensor& x, const MatrixStack& matrix, const Tensor& ids,
                             const ExpertSum& sum) {
  ExpertDownParams params{matmul_params(x, matrix, ids, Activation{}, true), sum_params(sum)};
  params.has_identity = sum.has_identity;
  if (sum.has_identity) params.sum.has_shared = 0;
  return params;
}

double issue_cycles_of(const MatrixStack& matrix, int64_t pairs) {
  return kIssueCyclesOfProduct * static_cast<double>(pairs) *
         static_cast<double>(matrix.rows * matrix.inputs);
}

// Experts that have no pair are not read.
Command& bind_matmul(Command& command, const Tensor& x, const MatrixStack& matrix, const Tensor& ids,
                     const Tensor& out, int64_t pairs) {
  const double part = std::min(1.0, static_cast<double>(pairs) / static_cast<double>(matrix.experts));
  return command.stand_in(ids)
      .bind(x, matrix.packed, matrix.scales, matrix.zeros, ids, matrix.bias, out)
      .work(issue_cycles_of(matrix, pairs), part * static_cast<double>(matrix.packed.nbytes()) +
                                                static_cast<double>(x.nbytes() + out.nbytes()));
}

// Rows of a tensor whose first dimension is tokens; none of none.
OptionalTensor rows_of(const OptionalTensor& tensor, int64_t start, int64_t count) {
  return tensor ? std::optional(tensor->narrow(0, start, count)) : std::nullopt;
}

// Dot products, and matrix products whose simdgroups split the inputs, count from the first input on.
void check_inputs(const MatmulStep& step, const Tensor& x) {
  const bool has_tiles = step.kernel.starts_with("gemm") && !step.shares_inputs;
  if (!has_tiles && step.kernels != KernelsOf::kTensorUnits) check_counted("an input", x.numel(), x.sizes());
}

// Adds one matmul; `out` has a row for each pair.
void add_matmul(Commands& commands, const Run& run, const MatmulStep& planned, const Tensor& x,
                const std::optional<InputNorm>& norm, const MatrixStack& matrix, const Activation& activation,
                bool x_per_pair, bool is_last, const Tensor& out) {
  const MatmulStep step = tuned(planned, matrix, run.ids.numel());
  check_inputs(step, x);
  MatmulParams params = matmul_params(x, matrix, run.ids, activation, x_per_pair);
  params.writes_tiles = !is_last;
  if (step.norms_inputs) set_norm(params, *norm);
  Command& command = commands.add(library_of(step, matrix), step.kernel);
  bind_matmul(command, x, matrix, run.ids, out, run.ids.numel())
      .bind(x)
      .params(params);  // x stands in for a residual
  if (step.norms_inputs) command.bind(norm->weight);
  run.launch(run.bind_buckets(command), step);
}

// Binds the matrix of a shared expert; the kernel reads none of `x` in its place.
Command& bind_shared(Command& command, const MatrixStack* shared, const Tensor& x) {
  return command.bind(shared ? shared->packed : x, shared ? shared->scales : x, shared ? shared->zeros : x);
}

// Adds the first matmul of experts that it chooses itself. It writes run.ids and sum.weights.
void add_chosen(Commands& commands, const Run& run, const MatmulStep& planned, const Tensor& x,
                const std::optional<InputNorm>& norm, const MatrixStack& matrix, const Activation& activation,
                const Router& router, const ExpertSum& sum, const SharedExpert* shared, const Tensor& out) {
  const MatmulStep step = tuned(planned, matrix, run.ids.numel());
  ChosenParams params{matmul_params(x, matrix, run.ids, activation, false), router.params, step.norms_inputs,
                      sum.weights_on_inputs};
  params.matmul.slots += shared != nullptr;
  if (step.norms_inputs) set_norm(params.matmul, *norm);
  if (shared) params.matmul.shared_activation = shared->activation.kind;
  Command& command = commands.add(library_of(step, matrix), step.kernel);
  bind_matmul(command, x, matrix, run.ids, out, params.matmul.slots)
      .stand_in(x)
      .bind(router.logits, router.bias, router.scale, sum.weights)
      .params(params)
      .bind(step.norms_inputs ? norm->weight : x);
  run.launch(bind_shared(command, shared ? &shared->matrices.gate_up : nullptr, x), step);
}

// Adds the second matmul with the weighted sum over a token's experts.
void add_second(Commands& commands, const Run& run, const MatmulStep& planned, const Tensor& hidden,
                const MatrixStack& matrix, const MatrixStack* shared, const ExpertSum& sum,
                const Tensor& out) {
  const MatmulStep step = tuned(planned, matrix, run.ids.numel());
  check_inputs(step, hidden);
  ExpertDownParams params = down_params(hidden, matrix, run.ids, sum);
  params.has_shared_expert = shared != nullptr;
  Command& command = commands.add(library_of(step, matrix), step.kernel);
  bind_matmul(command, hidden, matrix, run.ids, out, hidden.size(0));
  bind_sum(command, sum, out).params(params);
  if (run.plan.lists_pairs) {
    run.bind_buckets(command);
  } else {
    bind_shared(command, shared, hidden);
  }
  run.launch(command, step);
}

void add_combine(Commands& commands, const Run& run, const MatmulStep& step, const Tensor& expert_out,
                 const MatrixStack& matrix, const ExpertSum& sum, const Tensor& out) {
  Command& command = commands.add(part_of(matrix.library, kOfPrompts), step.kernel);
  command.bind(expert_out, run.ids);
  bind_sum(command, sum, out).bind(out).params(down_params(expert_out, matrix, run.ids, sum));
  run.launch(command, step);
}

}  // namespace

Library library_of(const MatmulStep& step, const MatrixStack& matrix) {
  switch (step.kernels) {
    case KernelsOf::kToken: return matrix.library;
    case KernelsOf::kJoined: return part_of(matrix.library, kJoined);
    case KernelsOf::kFew: return part_of(matrix.library, kOfFew);
    case KernelsOf::kPrompts: return part_of(matrix.library, kOfPrompts);
    case KernelsOf::kTensorUnits: return tensor_units_library(matrix.library);
    case KernelsOf::kVariants: return part_of(matrix.library, kVariants);
  }
}

void add_linear(Commands& commands, const Tensor& x_, const std::optional<InputNorm>& norm,
                const MatrixStack& matrix, const Activation& activation, const OptionalTensor& residual,
                const OptionalTensor& order, const Tensor& out) {
  const int64_t tokens = x_.numel() / x_.size(-1);
  const int64_t at_once = tokens_at_once(tokens, issue_cycles_of(matrix, tokens));
  if (at_once < tokens) {
    const auto rows = [&](const Tensor& all, int64_t start) -> const Tensor& {
      return commands.keep(all.view({tokens, -1}).narrow(0, start, std::min(at_once, tokens - start)));
    };
    for (int64_t start = 0; start < tokens; start += at_once) {
      const OptionalTensor added = residual ? std::optional(rows(*residual, start)) : std::nullopt;
      add_linear(commands, rows(x_, start), norm, matrix, activation, added, order, rows(out, start));
    }
    return;
  }
  const MatmulStep step =
      tuned(plan_linear(tokens, matrix.rows, matrix.inputs, outputs_of(matrix.rows, activation), gpu_cores(),
                        on_tensor_units(matrix, tokens), norms_for(norm, x_, matrix)),
            matrix, tokens);
  check_inputs(step, x_);
  const Tensor& x = norm && !step.norms_inputs ? add_norm(commands, x_, *norm) : x_;
  MatmulParams params = matrix_params(x, matrix, activation);
  params.tokens = params.pairs = tokens;
  params.slots = params.x_per_pair = 1;
  params.has_residual = residual.has_value();
  params.has_order = order.has_value();
  params.shares_inputs = step.shares_inputs;
  params.wide_out = out.scalar_type() != x.scalar_type();
  if (step.norms_inputs) set_norm(params, *norm);
  Command& command = commands.add(library_of(step, matrix), step.kernel);
  bind_matmul(command, x, matrix, order ? *order : x, out, tokens).stand_in(x).bind(residual).params(params);
  if (step.norms_inputs) {
    command.bind(norm->weight);
  } else if (!step.kernel.starts_with("matmul_rows") || step.kernels == KernelsOf::kFew) {
    command.bind(x, x);  // in place of lists of pairs; not read
  }
  command.threadgroups(step.grid, {step.threads});
}

Tensor apply_mlp(const Tensor& x, const std::optional<InputNorm>& norm, const FeedForward& matrices,
                 const Activation& activation, const OptionalTensor& residual) {
  at::DimVector of_hidden(x.sizes());
  of_hidden.back() = matrices.down.inputs;
  const Tensor hidden = at::empty(of_hidden, x.options()), out = at::empty(x.sizes(), x.options());
  Commands commands;
  add_linear(commands, x, norm, matrices.gate_up, activation, std::nullopt, std::nullopt, hidden);
  add_linear(commands, hidden, std::nullopt, matrices.down, Activation{}, residual, std::nullopt, out);
  commands.encode();
  return out;
}

Activation activation_of(std::string_view name, std::optional<double> alpha, std::optional<double> limit,
                         bool gated, bool interleaved) {
  Activation activation;
  activation.kind = ACTIVATION_SILU + code_of(name, {"silu", "gelu", "gelu_tanh", "relu", "relu2",
                                                     "swiglu_oai", "silu_clamped", "silu_capped"});
  activation.alpha = alpha ? static_cast<float>(*alpha) : SWIGLU_OAI_ALPHA;
  activation.limit = limit ? static_cast<float>(*limit) : SWIGLU_OAI_LIMIT;
  if (gated) activation.row_layout = interleaved ? ROWS_INTERLEAVED : ROWS_HALVES;
  return activation;
}

void warn_of_copy(const Tensor& weight) {
  TORCH_WARN_ONCE(
      "moe_mps: a stack of experts of shape ", weight.sizes(), ", strides ", weight.strides(), " and offset ",
      weight.storage_offset(),
      " is copied in every call; keep the inputs of a row contiguous in memory, packed ones on 16 bytes");
}

namespace {

void project_pairs_into(const Tensor& out, const Tensor& x_, const MatrixStack& matrix_, const Tensor& ids_) {
  const int64_t tokens = ids_.size(0),
                at_once = tokens_at_once(tokens, issue_cycles_of(matrix_, ids_.numel()));
  for (int64_t start = 0; at_once < tokens && start < tokens; start += at_once) {
    const int64_t count = std::min(at_once, tokens - start);
    project_pairs_into(out.narrow(0, start, count), x_.narrow(0, start, count), matrix_,
                       ids_.narrow(0, start, count));
  }
  if (at_once < tokens) return;
  MatmulShape shape{ids_.size(0), ids_.size(1), matrix_.experts, matrix_.rows, matrix_.rows};
  shape.empty = is_empty(matrix_);
  shape.first_on_tensor_units = on_tensor_units(matrix_, shape.pairs());
  const Tensor x = shape.empty ? out : aligned(x_), ids = ids_.contiguous();
  const MatrixStack matrix = bindable(matrix_, out);
  const MatmulPlan plan = plan_experts(shape, gpu_cores());
  const Run run(plan, ids, shape.experts);
  Commands commands;
  for (const MatmulStep& step : plan.steps) {
    if (step.work == MatmulWork::kBucket) {
      add_bucket(commands, ids, shape.experts, run.buckets, plan.tiles);
    } else {
      add_matmul(commands, run, step, x, std::nullopt, matrix, Activation{}, x_.dim() == 3, true, out);
    }
  }
  commands.encode();
}

// Summands of tokens of any leading dimensions, as those of rows.
ExpertSum of_rows(const ExpertSum& sum) {
  ExpertSum flat = sum;
  flat.weights = as_rows(sum.weights);
  if (sum.shared_out) flat.shared_out = as_rows(*sum.shared_out);
  if (sum.residual) flat.residual = as_rows(*sum.residual);
  if (sum.shared_gate) flat.shared_gate = sum.shared_gate->reshape({sum.shared_gate->numel()});
  return flat;
}

// With a router the first matmul chooses, and has a shared expert or none. Else x has a row for each pair if
// its weights are on inputs.
void apply_experts_into(const Tensor& out, const Tensor& x_, const std::optional<InputNorm>& norm,
                        const FeedForward& experts, const Tensor& ids_, const Activation& activation,
                        const ExpertSum& sum, const Router* router, const SharedExpert* shared) {
  const MatrixStack& gate_up = experts.gate_up;
  const double most =
      std::max(issue_cycles_of(gate_up, ids_.numel()), issue_cycles_of(experts.down, ids_.numel()));
  const int64_t tokens = ids_.size(0), at_once = tokens_at_once(tokens, most);
  for (int64_t start = 0; at_once < tokens && start < tokens; start += at_once) {
    const int64_t count = std::min(at_once, tokens - start);
    ExpertSum of_some{sum.weights.narrow(0, start, count),
                      rows_of(sum.shared_gate, start, count),
                      rows_of(sum.shared_out, start, count),
                      rows_of(sum.residual, start, count),
                      sum.gate_is_logit,
                      sum.has_identity,
                      sum.weights_on_inputs};
    const int64_t rows = x_.size(0) / tokens;
    apply_experts_into(out.narrow(0, start, count), x_.narrow(0, rows * start, rows * count), norm, experts,
                       ids_.narrow(0, start, count), activation, of_some, nullptr, nullptr);
  }
  if (at_once < tokens) return;
  Commands commands;
  const Tensor given = aligned(x_), ids = ids_.contiguous();
  MatmulShape shape{
      ids.size(0),      ids.size(1), gate_up.experts, gate_up.rows, outputs_of(gate_up.rows, activation),
      experts.down.rows};
  shape.empty = is_empty(experts.down);  // and so is gate_up
  shape.first_on_tensor_units = on_tensor_units(gate_up, shape.pairs());
  shape.second_on_tensor_units = on_tensor_units(experts.down, shape.pairs());
  shape.norms = norms_for(norm, given, gate_up);
  shape.chosen = router != nullptr;
  shape.shared = shared != nullptr;
  const MatrixStack down = bindable(experts.down, given);
  const MatmulPlan plan = plan_experts(shape, gpu_cores());
  const Run run(plan, ids, shape.experts);
  const bool norms = std::any_of(plan.steps.begin(), plan.steps.end(),
                                 [](const MatmulStep& step) { return step.norms_inputs; });
  const Tensor x = norm && !norms && !shape.empty ? add_norm(commands, given, *norm) : given;
  const Tensor hidden = shape.empty ? x : at::empty({ids.numel() + shape.shared, down.inputs}, x.options());
  Tensor expert_out;
  for (const MatmulStep& step : plan.steps) {
    switch (step.work) {
      case MatmulWork::kBucket: add_bucket(commands, ids, shape.experts, run.buckets, plan.tiles); break;
      case MatmulWork::kFirst:
        if (router != nullptr) {
          add_chosen(commands, run, step, x, norm, gate_up, activation, *router, sum, shared, hidden);
        } else {
          add_matmul(commands, run, step, x, norm, gate_up, activation, sum.weights_on_inputs, false, hidden);
        }
        break;
      case MatmulWork::kSecond:
        add_second(commands, run, step, hidden, down, shared ? &shared->matrices.down : nullptr, sum, out);
        break;
      case MatmulWork::kDown:
        expert_out = at::empty({ids.numel(), down.rows}, x.options());
        add_matmul(commands, run, step, hidden, std::nullopt, down, Activation{}, true, true, expert_out);
        break;
      case MatmulWork::kCombine: add_combine(commands, run, step, expert_out, down, sum, out); break;
    }
  }
  commands.encode();
}

// Experts whose ids and weights are given. What reads the normed input beside the first matmul takes a norm
// of its own.
void apply_given(const Tensor& out, const Tensor& x, const std::optional<InputNorm>& norm,
                 const FeedForward& experts, const Tensor& ids, const Activation& activation, ExpertSum sum) {
  if (!sum.has_identity && !sum.weights_on_inputs) {
    apply_experts_into(out, x, norm, experts, ids, activation, sum, nullptr, nullptr);
    return;
  }
  const Tensor rows = aligned(x);
  Tensor normed = rows;
  if (norm) {
    Commands commands;
    normed = add_norm(commands, rows, *norm);
    commands.encode();
  }
  if (sum.has_identity) sum.shared_out = normed;
  if (sum.weights_on_inputs) {
    normed = at::mul(normed.unsqueeze(1), sum.weights.to(x.scalar_type()).unsqueeze(2)).flatten(0, 1);
    sum.weights = at::ones_like(sum.weights);
  }
  apply_experts_into(out, normed, std::nullopt, experts, ids, activation, sum, nullptr, nullptr);
}

}  // namespace

Tensor project_pairs(const Tensor& x, const MatrixStack& matrix, const Tensor& ids) {
  at::DimVector shape(ids.sizes());
  shape.push_back(matrix.rows);
  Tensor out = at::empty(shape, x.options());
  if (out.numel() > 0) project_pairs_into(as_inputs(out, ids), as_inputs(x, ids), matrix, as_rows(ids));
  return out;
}

Tensor apply_experts(const Tensor& x, const std::optional<InputNorm>& norm, const FeedForward& experts,
                     const Tensor& ids, const Activation& activation, const ExpertSum& sum) {
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  apply_given(as_rows(out), as_rows(x), norm, experts, as_rows(ids), activation, of_rows(sum));
  return out;
}

Tensor apply_experts(const Tensor& x, const std::optional<InputNorm>& norm, const FeedForward& experts,
                     const Router& router, const std::optional<SharedExpert>& shared,
                     const Activation& activation, ExpertSum sum) {
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Tensor rows = as_rows(x);
  const bool empty = is_empty(experts.down), chooses = can_choose(router, rows, experts.gate_up) && !empty;
  const auto [weights, ids] = chooses ? empty_routing(router) : route(router);
  sum.weights = weights;
  if (shared && !chooses && !empty) {
    sum.shared_out = apply_mlp(aligned(rows), norm, shared->matrices, shared->activation);
  }
  if (chooses) {
    apply_experts_into(as_rows(out), rows, norm, experts, as_rows(ids), activation, of_rows(sum), &router,
                       shared ? &*shared : nullptr);
  } else {
    apply_given(as_rows(out), rows, norm, experts, as_rows(ids), activation, of_rows(sum));
  }
  return out;
}

}  // namespace moe_mps
