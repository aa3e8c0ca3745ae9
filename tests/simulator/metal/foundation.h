// Errors for host code; objects and autorelease pools, for what looks for leaks.
#pragma once
#include <cstddef>
#include <string>

#ifdef __OBJC__
@class NSError;
NSError* simulated_error(const std::string& message, long code = 0);
#endif

namespace simulator {
// Objective-C objects that exist.
long live_objects();
#ifdef __OBJC__
// Takes an object out of that number.
void keep_for_the_process(id object);
#endif
// The pools of the current thread.
size_t pool_depth();
void drain_pools(size_t depth);
}  // namespace simulator
