#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "../shaders/params.h"
#include "attention.h"
#include "attention_plan.h"
#include "gpu.h"
#include "metal/function.h"
#include "metal/work.h"
#include "register.h"
#include "rope.h"
#include "tensors.h"

namespace moe_mps {
namespace {

constexpr int64_t kMostKeyStride = kMostElements / 256;  // kernels count bytes within a tile of 64 keys
constexpr int64_t kRun = 8;  // elements of a dense head that a kernel loads at once, the most

}  // namespace

at::Tensor readable_rows(const at::Tensor& given, int64_t alignment, CacheParams& params) {
  at::Tensor rows = rows_contiguous(given);
  if (rows.stride(2) >= kMostKeyStride || !starts_aligned(rows, alignment))
    rows = rows.clone(at::MemoryFormat::Contiguous);
  params.values = head_strides(rows);
  params.width = rows.size(3);
  params.vectorised = params.width % kRun == 0 && starts_aligned(rows, kRun);
  return rows;
}

// Kernels have the strides of tokens and keys, or heads, in 32 bits.
OptionalTensor readable_mask(const OptionalTensor& mask) {
  const bool near = !mask || std::max(mask->stride(2), mask->stride(3)) <= kMostElements;
  return near ? mask : std::optional(mask->contiguous());
}

void set_mask(AttentionParams& params, const OptionalTensor& mask, std::optional<int64_t> window,
              int64_t lookahead) {
  const int64_t keys = params.keys, first = keys - params.tokens;
  lookahead = std::min(lookahead, std::max<int64_t>(keys, params.tokens));
  params.first_position = first + lookahead;
  if (!mask) {
    if (!window) return;
    window = std::min(*window, keys);
    params.window = *window + lookahead;
    params.first_key = std::max<int64_t>(0, first - *window + 1);
    return;
  }
  const auto dtype = mask->scalar_type();
  params.mask_kind = dtype == at::kBool ? MASK_BOOL : dtype == at::kInt ? MASK_BITS : MASK_ADDITIVE;
  if (params.mask_kind == MASK_ADDITIVE) params.mask_dtype = dtype_code(*mask);
  params.mask_batch_stride = mask->size(0) == 1 ? 0 : mask->stride(0);
  params.mask_head_stride = mask->size(1) == 1 ? 0 : mask->stride(1);
  params.mask_token_stride = mask->stride(2);
  params.mask_key_stride = mask->stride(3);
}

void set_gate(AttentionParams& params, const OptionalTensor& gate, bool is_softplus) {
  params.gate = token_strides(gate);
  if (!gate) return;
  params.gate_width = gate->size(3);
  params.gate_is_softplus = is_softplus;
}

void set_softmax(AttentionParams& params, const OptionalTensor& sinks, std::optional<double> softcap,
                 double scale) {
  params.has_sinks = sinks.has_value();
  params.sinks_dtype = dtype_code(sinks);
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap.value_or(0.0));
}

OptionalTensor partials_of(const AttentionPlan& plan, const AttentionParams& params, const at::Tensor& q) {
  if (plan.chunks == 1) return std::nullopt;
  const int64_t of_chunk = int64_t(params.rows) * (params.v.width + 2);
  return at::empty({plan.chunks * of_chunk}, q.options().dtype(at::kFloat));
}

void add_merge(Commands& commands, c10::ScalarType dtype, const AttentionPlan& plan,
               const AttentionParams& params, const at::Tensor& partials, const OptionalTensor& sinks,
               const OptionalTensor& gate, const at::Tensor& output) {
  const char* const merge = gate ? "attention_merge_gated" : "attention_merge";
  commands.add({"attention_merge", dtype}, merge, output)
      .bind(partials, sinks)
      .bind_strided(gate)
      .bind(output)
      .params(params)
      .threadgroups(plan.merge_grid, {kMergeSimdgroups * kSimdWidth});
}

namespace {

using at::Tensor;

constexpr int64_t kWordsOfRun = 2;

// Keys or values as the operator is given them.
struct CacheArguments {
  Tensor values;
  OptionalTensor scales = {}, zeros = {};  // for quantised ones
  OptionalTensor tail = {};
};

// Groups of the operators' arguments, as ops/families/attention.py describes them.
struct Order {
  std::optional<int64_t> window;
  OptionalTensor key_range;
};
struct Selected {
  OptionalTensor indices;
  int64_t block = 1;
};
struct Tail {
  OptionalTensor keys, values;
  int64_t rate = 1, position = 0;
};

struct AttentionArguments {
  Tensor q;
  CacheArguments k, v;
  double scale;
  OptionalTensor mask = {};
  Order order;
  Softmax softmax;
  Selected selected = {};
  int64_t lookahead = 0;
  Gate gate = {};
  Tail tail = {};
  c10::ScalarType dtype;

  // The same for a block of tokens.
  AttentionArguments of_tokens(int64_t start, int64_t count) const {
    AttentionArguments block = *this;
    block.q = q.narrow(2, start, count);
    if (mask) block.mask = mask->narrow(2, start, count);
    if (gate.factors) block.gate.factors = gate.factors->narrow(1, start, count);
    if (mask) return block;
    const int64_t visible = k.values.size(2) - (q.size(2) - start - count);
    for (CacheArguments* cache : {&block.k, &block.v}) {
      cache->values = cache->values.narrow(2, 0, visible);
      if (!cache->scales) continue;
      cache->scales = cache->scales->narrow(2, 0, visible);
      cache->zeros = cache->zeros->narrow(2, 0, visible);
    }
    return block;
  }
};

// What the public operator takes; the rest is absent.
AttentionArguments arguments_of(const Tensor& q, const Tensor& k, const Tensor& v, double scale,
                                const OptionalTensor& mask, std::optional<int64_t> window, int64_t lookahead,
                                const OptionalTensor& key_range, std::optional<double> softcap,
                                const OptionalTensor& sinks, const OptionalTensor& indices,
                                int64_t index_block, const OptionalTensor& k_scales,
                                const OptionalTensor& k_zeros, const OptionalTensor& v_scales,
                                const OptionalTensor& v_zeros) {
  return {.q = q,
          .k = {k, k_scales, k_zeros},
          .v = {v, v_scales, v_zeros},
          .scale = scale,
          .mask = mask,
          .order = {window, key_range},
          .softmax = {softcap, sinks},
          .selected = {indices, index_block},
          .lookahead = lookahead,
          .dtype = q.scalar_type()};
}

}  // namespace

template <>
struct GroupOf<AttentionArguments> : MadeBy<arguments_of> {};
template <>
struct GroupOf<Order> : MadeBy<aggregate<Order, std::optional<int64_t>, const OptionalTensor&>> {};
template <>
struct GroupOf<Tail>
    : MadeBy<aggregate<Tail, const OptionalTensor&, const OptionalTensor&, int64_t, int64_t>> {};

namespace {

// Keys or values as kernels read them.
struct Cache {
  CacheParams params{};
  Tensor values;
  OptionalTensor scales, zeros, tail;

  explicit Cache(const CacheArguments& given)
      : values(readable_rows(given.values, given.scales ? kWordsOfRun : 1, params)),
        scales(given.scales),
        zeros(given.zeros) {
    if (scales) set_scales();
    if (given.tail && given.tail->numel() > 0) set_tail(rows_contiguous(*given.tail));
  }

  void set_scales() {
    params.width *= 4;
    if (scales->strides() != zeros->strides() || scales->stride(3) != 1 || span(*scales) > kMostElements) {
      scales = scales->contiguous();
      zeros = zeros->contiguous();
    }
    check_counted("scales of keys or values", scales->numel(), scales->sizes());
    params.scales = head_strides(*scales);
    for (int64_t group = params.width / scales->size(3); group > 1; group /= 2) ++params.group_shift;
  }

  void set_tail(const Tensor& given) {
    tail = given.stride(2) < kMostKeyStride ? given : given.contiguous();
    params.tail = head_strides(*tail);
    params.vectorised = params.vectorised && starts_aligned(*tail, kRun);
  }

  // Arguments that the kernel's file reads beside the values.
  const OptionalTensor& beside() const { return tail ? tail : scales; }
};

void set_indices(AttentionParams& params, const Tensor& indices, int64_t block) {
  params.index = head_strides(indices);
  if (indices.size(1) == 1) params.index.head = 0;
  params.index_block = block;
}

// One token's heads that the kernel turns itself; the new key and value go to the end of their caches.
struct Turning {
  Rotation rotation;
  Heads q, k, v;
  RopeParams params;
};

// What the shapes of a call say.
struct Sizes {
  int64_t batch, heads, tokens, key_heads, stored, value_width;
  bool has_tail;
  int64_t tail_keys, selected, tail_slots;
  int64_t keys;  // that a token may see

  explicit Sizes(const AttentionArguments& given)
      : batch(given.q.size(0)),
        heads(given.q.size(1)),
        tokens(given.q.size(2)),
        key_heads(given.k.values.size(1)),
        stored(given.k.values.size(2)),
        value_width(given.v.values.size(3) * (given.v.scales ? 4 : 1)),
        has_tail(given.k.tail.has_value()),
        tail_keys(has_tail ? given.k.tail->size(2) : 0) {
    const OptionalTensor& chosen = given.selected.indices;
    selected = chosen ? chosen->size(3) * given.selected.block : tail_keys;
    tail_slots = tail_keys > 0 ? selected : 0;
    keys = has_tail               ? tail_slots + std::min(given.order.window.value_or(stored), stored)
           : chosen && stored > 0 ? selected
                                  : stored;
  }
};

// How long a call takes: in issue cycles, and how many tokens go into one launch.
struct Duration {
  double issue_cycles;
  int64_t at_once;

  Duration(const AttentionArguments& given, const Sizes& sizes) {
    // Keys that the last token sees, and that a token sees on average.
    const bool in_order = !given.mask && sizes.selected == 0;
    const double most = in_order ? std::min(sizes.keys, given.order.window.value_or(sizes.keys)) : sizes.keys;
    const double seen = in_order ? std::min(most, sizes.keys - 0.5 * (sizes.tokens - 1)) : sizes.keys;
    issue_cycles = kIssueCyclesOfAttention * static_cast<double>(sizes.batch * sizes.heads * sizes.tokens) *
                   seen * static_cast<double>(given.q.size(3) + sizes.value_width);
    const bool splits = sizes.selected == 0 && given.lookahead == 0 && is_too_long(issue_cycles);
    at_once = splits ? tokens_at_once(sizes.tokens, issue_cycles * most / seen) : sizes.tokens;
  }
};

// The arguments as kernels read them.
struct Readable {
  Tensor q;
  Cache k, v;
  OptionalTensor mask, key_range, sinks, indices, gate;

  explicit Readable(const AttentionArguments& given)
      : q(rows_contiguous(given.q)),
        k(given.k),
        v(given.v),
        mask(readable_mask(given.mask)),
        key_range(contiguous(given.order.key_range)),
        sinks(contiguous(given.softmax.sinks)),
        indices(rows_contiguous(given.selected.indices)),
        gate(rows_contiguous(given.gate.factors)) {}
};

AttentionParams params_of(const AttentionArguments& given, const Sizes& sizes, const Readable& readable) {
  AttentionParams params{};
  params.k = readable.k.params;
  params.v = readable.v.params;
  params.q = head_strides(readable.q);
  params.tokens = sizes.tokens;
  params.heads = sizes.heads;
  params.key_heads = sizes.key_heads;
  params.keys = sizes.keys;
  params.indexed_keys = sizes.stored;
  params.tail_keys = sizes.tail_keys;
  params.tail_slots = sizes.tail_slots;
  params.tail_rate = given.tail.rate;
  params.position = given.tail.position;
  if (!sizes.has_tail) set_mask(params, readable.mask, given.order.window, given.lookahead);
  if (readable.indices) set_indices(params, *readable.indices, given.selected.block);
  set_gate(params, readable.gate, given.gate.is_softplus);
  set_softmax(params, readable.sinks, given.softmax.softcap, given.scale);
  params.output_is_float = given.dtype == at::kFloat;
  params.has_key_range = readable.key_range.has_value();
  params.rows = sizes.batch * sizes.tokens * sizes.heads;
  return params;
}

AttentionShape shape_of(const Sizes& sizes, const Readable& readable, const AttentionParams& params,
                        bool turns) {
  const char* const file = turns              ? "attention_turned"
                           : sizes.has_tail   ? "attention_tailed"
                           : readable.indices ? "attention_selected"
                                              : "attention";
  const bool is_plain = !readable.mask && !readable.k.scales && !turns;
  return {sizes.batch,
          sizes.tokens,
          sizes.heads,
          sizes.key_heads,
          sizes.keys - params.first_key,
          params.k.width,
          sizes.value_width,
          file,
          is_plain && readable.q.element_size() == 2};
}

// Binds the tensors of a launch; with `turning`, of attention_turned.
void bind_operands(Command& command, const Sizes& sizes, const Readable& readable,
                   const AttentionParams& params, const Turning* turning, const Tensor& output,
                   const OptionalTensor& partials) {
  const Cache &k = readable.k, &v = readable.v;
  if (turning) {
    command.stand_in(k.values)
        .bind_strided(turning->q.input, k.values, v.values, turning->k.input, turning->v.input,
                      turning->rotation.cos, turning->rotation.sin, turning->q.weight, turning->k.weight,
                      turning->v.weight)
        .stand_in(output)
        .bind(readable.sinks, output, partials)
        .bind_strided(readable.key_range, readable.gate)
        .params(TurnedParams{params, turning->params});
    return;
  }
  const bool has_keys = sizes.stored > 0, selects = sizes.selected > 0 && readable.indices;
  command.bind_strided(readable.q, has_keys ? k.values : output, has_keys ? v.values : output, readable.mask)
      .bind(readable.sinks, output, partials)
      .bind_strided(k.beside(), k.zeros, v.beside(), v.zeros, selects ? readable.indices : readable.key_range,
                    readable.gate)
      .params(params);
}

void encode(const Sizes& sizes, const Readable& readable, AttentionParams params, const Turning* turning,
            double issue_cycles, const Tensor& output) {
  const Tensor& q = readable.q;
  const AttentionShape shape = shape_of(sizes, readable, params, turning != nullptr);
  const AttentionPlan plan = plan_attention(shape, gpu_cores());
  params.chunk = plan.chunk;
  params.chunks = plan.chunks;
  const OptionalTensor partials = partials_of(plan, params, q);
  const double bytes_of_keys = static_cast<double>(sizes.batch * sizes.key_heads) *
                               static_cast<double>(sizes.keys) *
                               static_cast<double>(q.element_size() * (params.k.width + sizes.value_width));
  Commands commands;
  const bool is_quantized = readable.k.scales.has_value();
  Command& command = commands.add(attention_library(shape.file, plan.width, q.scalar_type(), is_quantized),
                                  plan.kernel, output);
  bind_operands(command, sizes, readable, params, turning, output, partials);
  command.work(issue_cycles, static_cast<double>(q.nbytes() + output.nbytes()) + bytes_of_keys)
      .threadgroup_memory(plan.memory)
      .threadgroups(plan.grid, {plan.threads});
  if (partials)
    add_merge(commands, q.scalar_type(), plan, params, *partials, readable.sinks, readable.gate, output);
  commands.encode();
}

// With `turning`, given.q only has the shape of the queries.
Tensor attend(const AttentionArguments& given, const Turning* turning = nullptr) {
  const Sizes sizes(given);
  Tensor output = at::empty({sizes.batch, sizes.tokens, sizes.heads, sizes.value_width},
                            given.q.options().dtype(given.dtype));
  if (output.numel() == 0) return output;
  if (sizes.keys == 0) return output.zero_();
  const Duration duration(given, sizes);
  if (duration.at_once < sizes.tokens) {
    std::vector<Tensor> blocks;
    for (int64_t start = 0; start < sizes.tokens; start += duration.at_once) {
      const int64_t count = std::min(duration.at_once, sizes.tokens - start);
      blocks.push_back(attend(given.of_tokens(start, count)));
    }
    return at::cat(blocks, 1);
  }
  const Readable readable(given);
  encode(sizes, readable, params_of(given, sizes, readable), turning, duration.issue_cycles, output);
  return output;
}

Tensor cached_attention(const AttentionArguments& given) {
  return attend(given);
}

Tensor _cached_attention(AttentionArguments given, const Gate& gate, const Tail& tail,
                         std::optional<std::string_view> dtype) {
  given.gate = gate;
  given.tail = tail;
  given.k.tail = tail.keys;
  given.v.tail = tail.values;
  if (dtype) given.dtype = dtype_named(*dtype);
  return attend(given);
}

// Behind more keys a launch is a small part, and all threadgroups would turn their queries again.
constexpr int64_t kMostTurnedKeys = 4096;

// Whether one threadgroup takes all queries of a key head for some keys, in place. It turns them itself if
// what it reads can be read as vectors, too.
bool can_turn(const AttentionArguments& given) {
  const Tensor &q = given.q, &keys = given.k.values, &values = given.v.values;
  if (q.numel() == 0 || q.size(2) != 1 || keys.size(2) > kMostTurnedKeys) return false;
  if (keys.stride(3) != 1 || values.stride(3) != 1) return false;
  if (keys.stride(2) >= kMostKeyStride || values.stride(2) >= kMostKeyStride) return false;
  const AttentionShape shape{q.size(0),    1,         q.size(1),      keys.size(1),
                             keys.size(2), q.size(3), values.size(3), "attention_turned"};
  return plan_attention(shape, gpu_cores()).grid.y == 1;
}

Tensor _rope_attention_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys_,
                        const Tensor& values_, const OptionalTensor& cos, const OptionalTensor& sin,
                        double scale, const HeadNorms& norms, const Turn& turn, const ValueNorm& norm,
                        const Order& order, const Softmax& softmax, const Gate& gate) {
  const CacheArguments keys{keys_}, values{values_};
  AttentionArguments given{.q = q.transpose(1, 2),
                           .k = keys,
                           .v = values,
                           .scale = scale,
                           .order = order,
                           .softmax = softmax,
                           .gate = gate,
                           .dtype = q.scalar_type()};
  if (can_turn(given)) {
    const Rotation rotation(q, cos, sin, norms, turn);
    Turning turning{rotation, heads_of(q, norms.q_weight, given.q, rotation.rotary),
                    heads_of(k, norms.k_weight, keys_, rotation.rotary),
                    heads_of(v, norm.weight, values_, 0)};
    turning.v.params.is_normed = norm.norms;
    turning.params = rope_params(rotation, turning.q, turning.k, turning.v);
    if (turning.params.vectorised != 0) return attend(given, &turning);
  }
  given.q = _rope_cache_(q, k, v, keys_, values_, cos, sin, norms, turn, norm, std::nullopt);
  return attend(given);
}

// Whether torch's attention would take the GPU for too long at once, with so many multiply-adds.
bool is_long(double products) {
  return is_too_long(kIssueCyclesOfAttention * products / 2);
}

void _write_cache_quantized_(const Tensor& states_, const Tensor& packed_, const Tensor& scales_,
                             const Tensor& zeros_, int64_t start) {
  if (states_.numel() == 0) return;
  const Tensor states = vector_rows(states_);
  const bool same_strides = scales_.strides() == zeros_.strides() && scales_.stride(3) == 1;
  const Tensor packed = rows_contiguous(packed_);
  const Tensor scales = same_strides ? scales_ : scales_.contiguous();
  const Tensor zeros = same_strides ? zeros_ : zeros_.contiguous();

  CacheWriteParams params{};
  params.packed = head_strides(packed);
  params.groups = head_strides(scales);
  params.states = head_strides(states);
  params.threads = states.numel() / 4;
  params.words = packed.size(3);
  params.group_words = packed.size(3) / scales.size(3);
  params.tokens = states.size(2);
  params.heads = states.size(1);
  params.start = start;
  Commands commands;
  commands.add({"write_cache", states.scalar_type()}, "write_cache_quantized")
      .bind_strided(states, packed, scales, zeros)
      .params(params)
      .threadgroups({ceil_div(params.threads, kCacheThreads)}, {kCacheThreads});
  commands.encode();
  for (const auto& [written, target] : {std::pair(packed, packed_), {scales, scales_}, {zeros, zeros_}}) {
    if (!written.is_same(target)) target.copy_(written);
  }
}

}  // namespace

MOE_FUNCTION("_is_long(float products) -> bool", is_long)
MOE_OPERATOR(cached_attention)
MOE_OPERATOR(_cached_attention)
MOE_OPERATOR(_rope_attention_)
MOE_OPERATOR(_write_cache_quantized_)

}  // namespace moe_mps
