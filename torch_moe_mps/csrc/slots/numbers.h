// The numbers by which `_expert_slots` calls pools, on a GPU.
#pragma once
#include <cstdint>
#include <memory>

#include "pool.h"

namespace moe_mps {

// `limit`: seconds that an answer to a GPU may take from when the ids are there. The pool is not kept.
void add_number(int64_t number, const std::shared_ptr<Pool>& pool, double limit);
void release_number(int64_t number);

}  // namespace moe_mps
