// The aten operators of the simulated device that handle memory. All arithmetic is in fallback.cpp.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_for_mps.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "../metal/runtime.h"
#include "device.h"
#include "torch.h"

namespace simulator {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using std::optional;

}  // namespace

Tensor host_view(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  void* contents = storage.nbytes() && storage.data() ? buffer_contents(storage.data()) : nullptr;
  c10::DataPtr pointer(
      contents, new c10::Storage(storage), [](void* s) { delete static_cast<c10::Storage*>(s); }, at::kCPU);
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.sym_nbytes(), std::move(pointer), nullptr,
                     false);
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

namespace {

// Waits for the device.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_mps()) return tensor;
  synchronize();
  return host_view(tensor);
}

c10::ScalarType supported(optional<at::ScalarType> dtype) {
  const auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  TORCH_CHECK_TYPE(
      type != at::kDouble && type != at::kComplexDouble,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please "
      "use float32 instead.");
  return type;
}

// NaN, or the largest integer, where torch.use_deterministic_algorithms() wants it.
Tensor filled(Tensor tensor) {
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<c10::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
  return filled(at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::MPS),
                                          supported(dtype), format));
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<c10::Device>, optional<bool>) {
  return filled(at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::MPS), supported(dtype)));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed =
      at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    synchronize();
    c10::DataPtr grown = allocator()->allocate(needed);
    if (storage->nbytes())
      memcpy(buffer_contents(grown.get()), buffer_contents(storage->data()), storage->nbytes());
    storage->set_data_ptr(std::move(grown));
    storage->set_nbytes(needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

// Copies from or to the CPU are made: they are the host's work. On the device they are the GPU's.
bool is_dropped(const Tensor& self) {
  return dropping() && self.is_mps() && !at::isIntegralType(self.scalar_type(), true);
}

// A copy from and to the CPU commits on a Mac, and waits for the device unless it does not block.
void copy(const Tensor& source, const Tensor& destination, bool non_blocking) {
  const bool is_read = source.is_mps() && !destination.is_mps() && !StandIn::is_there() && source.numel() > 0;
  // For other strides torch copies to a temporary, which is aligned.
  if (is_read && source.expand_as(destination).strides() == destination.strides())
    check_alignment(destination);
  if (is_read && non_blocking && !dropping()) return copy_without_waiting(source, destination);
  const bool is_written = !source.is_mps() && destination.is_mps() && !StandIn::is_there();
  if (is_written && non_blocking && source.numel() > 0 && !dropping())
    return copy_to_mps_without_waiting(source, destination);
  {
    const StandIn stand_in(!non_blocking && source.is_mps() != destination.is_mps());
    on_host(destination).copy_(on_host(source));
    stand_in.count();
  }
  if (source.is_mps() == destination.is_mps() || StandIn::is_there()) return;
  end_encoder();  // it is a blit
  non_blocking ? commit_in_queue() : synchronize_host();
}
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!is_dropped(self) || !source.is_mps()) copy(source, self, non_blocking);
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  copy(self, destination, non_blocking);
  return destination;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  if (self.sizes() != destination.sizes()) destination.resize_(self.sizes());
  if (self.numel()) copy(self, destination, true);  // of operators that fall back to the CPU
  return destination;
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                           IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {elements}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage_offset(self, at::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0},
                            {});
}

Tensor& fill_scalar(Tensor& self, const at::Scalar& value) {
  if (is_dropped(self)) return self;
  const StandIn stand_in;
  on_host(self).fill_(value);
  stand_in.count();
  return self;
}
Tensor& fill_tensor(Tensor& self, const Tensor& value) {
  if (is_dropped(self)) return self;
  const StandIn stand_in;
  on_host(self).fill_(on_host(value));
  stand_in.count();
  return self;
}
Tensor& zero_(Tensor& self) {
  if (is_dropped(self)) return self;
  const StandIn stand_in;
  on_host(self).zero_();
  stand_in.count();
  return self;
}
at::Scalar local_scalar_dense(const Tensor& self) {
  synchronize_host();
  return at::_local_scalar_dense(on_host(self));
}

// torch's one command of attention without gradients. The math version adds the mask.
std::tuple<Tensor, Tensor> attention_in_one(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const optional<Tensor>& mask, double dropout, bool is_causal,
                                            const optional<Tensor>& dropout_mask, optional<double> scale,
                                            bool enable_gqa) {
  if (!dropping())
    return at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, dropout_mask,
                                                  scale, enable_gqa);
  std::vector<int64_t> sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  return {at::empty(sizes, query.options()), Tensor()};
}

// libtorch's own choice of an attention kernel asserts on a device type that its build does not have. Tensors
// may be fake ones whose sizes are symbols.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask,
                 double dropout, bool is_causal, optional<double> scale, bool enable_gqa) {
  optional<Tensor> added = mask;
  if (mask && mask->dtype() == at::kBool)  // where it allows attention it adds 0
    added = at::zeros_like(*mask, query.options()).masked_fill(mask->logical_not(), -INFINITY);
  const auto run = at::GradMode::is_enabled() ? at::_scaled_dot_product_attention_math
                                              : at::_scaled_dot_product_attention_math_for_mps;
  return std::get<0>(run(query, key, value, added, dropout, is_causal, std::nullopt, scale, enable_gqa));
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("fill_.Scalar", fill_scalar);
  m.impl("fill_.Tensor", fill_tensor);
  m.impl("zero_", zero_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_scaled_dot_product_attention_math_for_mps", attention_in_one);
}
TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) {
  m.impl("scaled_dot_product_attention", attention);
}

}  // namespace
}  // namespace simulator
