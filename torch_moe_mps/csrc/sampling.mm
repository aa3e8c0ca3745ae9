#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "../shaders/params.h"
#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

Tensor _sample_with_flags(const Tensor& logits_, const OptionalTensor& draws_, double temperature,
                          int64_t top_k, double top_p, double min_p, int64_t otherwise,
                          const OptionalTensor& invalid_) {
  const int64_t rows = logits_.size(0), vocabulary = logits_.size(1);
  Tensor sampled = at::empty({2, rows}, logits_.options().dtype(at::kLong));
  if (rows == 0) return sampled;
  const Tensor logits = rows_contiguous(logits_);
  const OptionalTensor draws = contiguous(draws_), invalid = contiguous(invalid_);
  SampleParams params{};
  params.row_stride = logits.stride(0);
  params.rows = rows;
  params.vocabulary = vocabulary;
  params.top_k = top_k < vocabulary ? top_k : 0;
  const double removed = static_cast<float>(1.0 - top_p);  // rounded as transformers does
  params.weight = std::max<int64_t>(1, kWholeWeight - std::llround(removed * kWholeWeight));
  params.otherwise = otherwise;
  // Without draws the logits decide: a quotient may be infinite, or equal that of its neighbour.
  params.temperature = draws.has_value() ? static_cast<float>(temperature) : 1.0f;
  params.min_p = static_cast<float>(min_p);
  params.has_draws = draws.has_value();
  params.has_invalid = invalid.has_value();
  Commands commands;
  commands.add({"sampling", logits.scalar_type()}, "sample_rows", sampled)
      .bind_strided(logits)
      .bind(draws, invalid, sampled)
      .params(params)
      .threadgroups({rows}, {kSampleThreads});
  commands.encode();
  return sampled;
}

Tensor sample(const Tensor& logits, const OptionalTensor& draws, double temperature, int64_t top_k,
              double top_p, double min_p, int64_t otherwise) {
  return _sample_with_flags(logits, draws, temperature, top_k, top_p, min_p, otherwise, std::nullopt)
      .select(0, 0);
}

}  // namespace

MOE_OPERATOR(sample)
MOE_OPERATOR(_sample_with_flags)

}  // namespace moe_mps
