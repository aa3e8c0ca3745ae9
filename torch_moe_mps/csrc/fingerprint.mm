// Compares what dictionaries of Python hold with what they held: what a captured token rests on.
//
// torch_moe_mps/models/capture/fingerprint.py calls this with ctypes, with Python's lock held, and
// hands over a function of Python: the extension is linked with no Python. Between two tokens the processor's
// caches lose most of these thousands of objects, hence the prefetch.
#include <cstddef>
#include <cstdint>

// Gives the next entry of a dictionary; 0 behind the last.
using Next = int (*)(const void* dictionary, std::ptrdiff_t* position, const void** key, const void** value);

constexpr std::size_t kAhead = 16;  // dictionaries

// Whether each of `dictionaries` has as many entries as `sizes` says, with the keys and values in `held`.
extern "C" bool moe_mps_holds(Next next, const void* const* dictionaries, const std::int64_t* sizes,
                              const void* const* held, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(dictionaries[i + kAhead]);
    std::ptrdiff_t position = 0;
    const void *key, *value;
    for (std::int64_t entry = 0; entry < sizes[i]; ++entry, held += 2) {
      if (!next(dictionaries[i], &position, &key, &value) || key != held[0] || value != held[1]) return false;
    }
    if (next(dictionaries[i], &position, &key, &value)) return false;
  }
  return true;
}
