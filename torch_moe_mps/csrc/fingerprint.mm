// Compares what objects of Python hold with what they held: what a captured token rests on.
//
// torch_moe_mps/transformers/capture/fingerprint.py calls this with ctypes, with Python's lock held, and
// hands over functions of Python: the extension is linked with no Python. Between two tokens the processor's
// caches lose most of these thousands of objects, hence the prefetches.
#include <cstddef>
#include <cstdint>

// Gives the next entry of a dictionary; 0 behind the last.
using Next = int (*)(const void* dictionary, std::ptrdiff_t* position, const void** key, const void** value);

// What one object gives: its type, or the code of a function.
using Get = const void* (*)(const void* object);
using Release = void (*)(const void* given);

constexpr std::size_t kAhead = 16;  // objects

// Whether each of `objects` gives what is in `held`; `release`, or null: for what a getter counts as given.
extern "C" bool moe_mps_gives(Get get, Release release, const void* const* objects, const void* const* held,
                              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(objects[i + kAhead]);
    const void* const given = get(objects[i]);
    if (release) release(given);
    if (given != held[i]) return false;
  }
  return true;
}

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
