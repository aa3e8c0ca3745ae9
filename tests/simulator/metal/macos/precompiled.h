// What most sources include, parsed once. The simulator's build parses each source by itself: what a source
// forgets to include is found there.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
