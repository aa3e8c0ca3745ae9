#include "memory.h"

#include <link.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

namespace msl {

Memory memory;
Place here;
__thread PrivateMemory private_memory;

namespace {
constexpr size_t shadow_capacity = size_t(1) << 38;  // address space only; pages come with use

void* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}

inline unsigned epoch_of(Stamp s) {
  return s >> code_bits;
}
inline Stamp code_of(Stamp s) {
  return s & code_mask;
}
inline bool is_atomic(Stamp s) {
  return code_of(s) >= code_atomic && code_of(s) < code_atomic + 32;
}

// The simdgroup that a stamp belongs to, or -1 where there are several.
inline int simdgroup_of(Stamp s) {
  const Stamp code = code_of(s);
  if (code < code_simdgroup) return code / 32;
  if (code < code_many) return code - code_simdgroup;
  if (is_atomic(s)) return code - code_atomic;
  return -1;
}

inline void mark_word(uint64_t* bits, size_t offset, size_t size) {
  const unsigned shift = offset & 63;
  const uint64_t mask = size >= 64 ? ~0ull : (1ull << size) - 1;
  bits[offset >> 6] |= mask << shift;
  if (shift + size > 64) bits[(offset >> 6) + 1] |= mask >> (64 - shift);
}

inline void mark(uint64_t* bits, size_t offset, size_t size) {
  for (; size > 64; offset += 64, size -= 64) mark_word(bits, offset, 64);
  mark_word(bits, offset, size);
}

enum class Relation { untouched, earlier_group, ordered, mine, concurrent };

Relation relation(Stamp other, bool threadgroup) {
  if (other < here.group_first) return other == 0 ? Relation::untouched : Relation::earlier_group;
  if (code_of(other) == code_many_groups) return Relation::earlier_group;
  if (other < here.ordered[threadgroup]) return Relation::ordered;
  if (simdgroup_of(other) == int(here.simdgroup) && other < here.simd_ordered[threadgroup])
    return Relation::ordered;
  if (code_of(other) == code_of(here.stamp)) return Relation::mine;
  return Relation::concurrent;
}

// The readers of a byte after the running thread has read it too.
Stamp joined_readers(Stamp readers, bool threadgroup) {
  const Stamp epoch = here.stamp & ~Stamp(code_mask);
  switch (relation(readers, threadgroup)) {
    case Relation::earlier_group: return threadgroup ? here.stamp : epoch | code_many_groups;
    case Relation::concurrent:
      return epoch | (simdgroup_of(readers) == int(here.simdgroup) ? code_simdgroup + here.simdgroup
                                                                   : Stamp(code_many));
    default: return here.stamp;
  }
}

struct ModuleSearch {
  uintptr_t code;
  std::vector<std::pair<uintptr_t, size_t>> pieces;
};
int visit_module(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<ModuleSearch*>(data);
  std::vector<std::pair<uintptr_t, size_t>> pieces;
  bool found = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t start = info->dlpi_addr + header.p_vaddr;
    pieces.emplace_back(start, header.p_memsz);
    found = found || search.code - start < header.p_memsz;
  }
  if (!found) return 0;
  search.pieces = pieces;
  return 1;
}
}  // namespace

void* Memory::shadow_room(size_t bytes) {
  if (!shadow) shadow = static_cast<char*>(reserve(shadow_capacity));
  bytes = (bytes + 4095) & ~size_t(4095);
  if (shadow_used + bytes > shadow_capacity)
    finding("the buffers of this dispatch are too large for the checker");
  void* p = shadow + shadow_used;
  shadow_used += bytes;
  return p;
}

// Bindings may overlap (views of one buffer). Each byte belongs to the binding that starts last before it,
// and may be written where one of its bindings may.
void Memory::add_buffers(const msl_dispatch& d) {
  auto start_of = [](const msl_binding& b) { return reinterpret_cast<uintptr_t>(b.data); };
  std::vector<uintptr_t> edges;
  for (const msl_binding& b : d.buffers)
    if (b.data) edges.insert(edges.end(), {start_of(b), start_of(b) + b.size});
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (size_t i = 0; i + 1 < edges.size(); i++) {
    Segment s;
    s.base = edges[i], s.size = edges[i + 1] - edges[i], s.space = Space::device_readonly;
    for (int index = 0; index < 31; index++) {
      const msl_binding& b = d.buffers[index];
      if (!b.data || s.base - start_of(b) >= b.size) continue;
      if (s.binding < 0 || start_of(b) >= start_of(d.buffers[s.binding])) s.binding = index;
      const msl_argument* argument = buffer_argument(*d.kernel, index);
      if (argument && argument->writable) s.space = Space::device;
    }
    if (s.binding < 0) continue;
    const size_t words = (s.size / 64 + 2) * 8;
    s.touched = static_cast<uint8_t*>(shadow_room((s.size >> chunk_shift) + 1));
    s.read_bits = static_cast<uint64_t*>(shadow_room(words));
    if (s.space == Space::device) {
      s.write_bits = static_cast<uint64_t*>(shadow_room(words));
      s.reads = static_cast<Stamp*>(shadow_room(s.size * sizeof(Stamp)));
      s.writes = static_cast<Stamp*>(shadow_room(s.size * sizeof(Stamp)));
    }
    segments.push_back(s);
  }
}

// Tables in the constant address space are globals of the shader's module.
void Memory::add_module(const void* code) {
  ModuleSearch search{reinterpret_cast<uintptr_t>(code), {}};
  dl_iterate_phdr(visit_module, &search);
  for (auto& [start, size] : search.pieces) {
    Segment s;
    s.base = start, s.size = size, s.space = Space::module;
    segments.push_back(s);
  }
}

Segment Memory::arena_segment() {
  if (!arena) {
    arena = static_cast<char*>(reserve(arena_size));
    arena_reads = static_cast<Stamp*>(reserve(arena_size * sizeof(Stamp)));
    arena_writes = static_cast<Stamp*>(reserve(arena_size * sizeof(Stamp)));
    std::fill(arena_writes, arena_writes + arena_size, redzone);
  }
  Segment s;
  s.base = reinterpret_cast<uintptr_t>(arena), s.size = arena_size, s.space = Space::threadgroup;
  s.reads = arena_reads, s.writes = arena_writes;
  return s;
}

void Memory::begin(const msl_dispatch& d, const void* code) {
  dispatch = &d;
  segments.clear();
  shadow_used = 0;
  segments.reserve(128);
  segments.push_back(arena_segment());
  add_buffers(d);
  add_module(code);
  std::fill(std::begin(recent), std::end(recent), &segments[0]);
  statics.clear();
  groups_begun = 0;
  group_epochs.clear();
  epoch = 1;
  threadgroup_accesses = atomics = spins = 0;
}

void Memory::begin_threadgroup() {
  Segment& a = segments[0];
  std::fill(a.writes, a.writes + arena_used, redzone);
  std::fill(a.reads, a.reads + arena_used, 0);
  memset(arena, 0xff, arena_used);  // what is not written reads as NaN
  arena_used = redzone_bytes;
  arena_counted = 0;
  variables.clear();
  groups_begun++;
  if (epoch > max_epoch - 4096) renumber_epochs(false);
  group_epochs.push_back(epoch + 1);
}

void* Memory::threadgroup_allocate(size_t bytes, const std::string& name) {
  const size_t offset = arena_used;
  arena_counted += (bytes + 15) & ~size_t(15);
  if (arena_counted > arena_limit)
    finding("threadgroup memory over 32 KiB: '" + name + "' brings it to " + std::to_string(arena_counted) +
            " bytes");
  std::fill(segments[0].writes + offset, segments[0].writes + offset + bytes, 0);
  arena_used = (offset + bytes + redzone_bytes + 63) & ~size_t(63);
  if (arena_used > arena_size) finding("too many threadgroup variables for the checker");
  variables.push_back({offset, bytes, name});
  return arena + offset;
}

void* Memory::threadgroup_static(unsigned site, size_t bytes, const char* name) {
  if (site >= statics.size()) statics.resize(site + 1, {0, 0, 0});
  StaticVariable& s = statics[site];
  if (s.group != groups_begun || s.size != bytes) {
    char* p = static_cast<char*>(threadgroup_allocate(bytes, name));
    s = {size_t(p - arena), bytes, groups_begun};
  }
  return arena + s.offset;
}

uint32_t Memory::next_epoch() {
  return epoch < max_epoch ? ++epoch : epoch;
}

// Stamps hold 21 bits of epoch: after two million barriers all are mapped to "earlier" so that counting can
// start again.
void Memory::renumber_epochs(bool within_group) {
  const Stamp first = within_group ? here.group_first : ~Stamp(0);
  auto renumber = [&](Stamp& s) {
    if (s != 0 && s != redzone) s = (s < first ? 1u : 2u) << code_bits | code_of(s);
  };
  for (Segment& segment : segments) {
    if (segment.space == Space::threadgroup) {
      for (size_t i = 0; i < arena_used; i++) renumber(segment.reads[i]), renumber(segment.writes[i]);
    } else if (segment.space == Space::device) {
      for (size_t i = 0; i < segment.size; i++) {
        if (!(i & ((1u << chunk_shift) - 1)) && !segment.touched[i >> chunk_shift]) {
          i += (1u << chunk_shift) - 1;
          continue;
        }
        renumber(segment.reads[i]), renumber(segment.writes[i]);
      }
    }
  }
  group_epochs.clear();
  group_epochs.push_back(2);
  epoch = 3;
}

long Memory::group_of(Stamp stamp) const {
  const auto next = std::upper_bound(group_epochs.begin(), group_epochs.end(), epoch_of(stamp));
  if (next == group_epochs.begin()) return -1;
  return long(groups_begun) - 1 - (group_epochs.end() - next);
}

Segment* Memory::find(uintptr_t address, size_t size, bool write, const void* caller) {
  for (Segment& s : segments) {
    if (address - s.base < s.size && address - s.base + size <= s.size) {
      if (s.space == Space::module && write) out_of_bounds(address, size, write, caller);
      recent[(reinterpret_cast<uintptr_t>(caller) >> 2) & 255] = &s;
      return &s;
    }
  }
  return nullptr;
}

template <bool Write>
inline void Memory::check(Segment& segment, size_t offset, size_t size, bool atomic, const void* caller) {
  const bool threadgroup = segment.space == Space::threadgroup;
  for (size_t i = offset; i < offset + size; i++) {
    const Stamp written = segment.writes[i], read = segment.reads[i];
    if (threadgroup && written == redzone) out_of_bounds(segment.base + offset, size, Write, caller);
    const Relation writer = relation(written, threadgroup);
    const bool both_atomic = atomic && is_atomic(written);
    if (threadgroup && !Write && writer <= Relation::earlier_group)
      finding("reads uninitialised " + where(segment, offset), caller);
    if (writer == Relation::concurrent && !both_atomic)
      race(segment, i, written, true, Write, atomic, caller);
    if (writer == Relation::earlier_group && !threadgroup && !both_atomic)
      race(segment, i, written, true, Write, atomic, caller);
    if (Write) {
      const Relation reader = relation(read, threadgroup);
      if (reader == Relation::concurrent || (reader == Relation::earlier_group && !threadgroup))
        race(segment, i, read, false, Write, atomic, caller);
      segment.writes[i] =
          atomic ? (here.stamp & ~Stamp(code_mask)) | (code_atomic + here.simdgroup) : here.stamp;
    } else if (!atomic) {
      segment.reads[i] = joined_readers(read, threadgroup);
    }
  }
}

template <bool Write>
inline void Memory::device(Segment& s, size_t offset, size_t size, const void* caller) {
  s.touched[offset >> chunk_shift] = 1;
  (Write ? s.traffic.bytes_written : s.traffic.bytes_read) += size;
  mark(Write ? s.write_bits : s.read_bits, offset, size);
  if (((offset + size - 1) >> chunk_shift) != offset >> chunk_shift)
    for (size_t c = offset >> chunk_shift; c <= (offset + size - 1) >> chunk_shift; c++) s.touched[c] = 1;
  if (s.space == Space::device_readonly) return;
  // Nearly every access is to bytes that no other thread has touched, or only before an ordering barrier.
  const Stamp first = here.group_first, span = here.ordered[0] - first, me = here.stamp;
  bool quiet = true;
  for (size_t i = offset; i < offset + size; i++) {
    const Stamp w = s.writes[i], r = s.reads[i];
    quiet &= (w == 0) | (w == me) | (w - first < span);
    quiet &= (r == 0) | (r == me) | ((r - first < span) & (code_of(r) != code_many_groups));
  }
  if (!quiet) return check<Write>(s, offset, size, false, caller);
  Stamp* cells = (Write ? s.writes : s.reads) + offset;
  for (size_t i = 0; i < size; i++) cells[i] = me;
}

template <bool Write>
inline void Memory::threadgroup(size_t offset, size_t size, const void* caller) {
  Segment& s = segments[0];
  threadgroup_accesses++;
  const Stamp first = here.group_first, span = here.ordered[1] - first, me = here.stamp;
  bool quiet = true;
  for (size_t i = offset; i < offset + size; i++) {
    const Stamp w = s.writes[i], r = s.reads[i];
    quiet &= (Write & (w < first)) | (w == me) | (w - first < span);
    quiet &= (r < first) | (r == me) | (r - first < span);
  }
  if (!quiet) return check<Write>(s, offset, size, false, caller);
  Stamp* cells = (Write ? s.writes : s.reads) + offset;
  for (size_t i = 0; i < size; i++) cells[i] = me;
}

__attribute__((always_inline)) inline void Memory::access(uintptr_t address, size_t size, bool write,
                                                          const void* caller) {
  if (private_memory.has(address)) return;
  Segment* s = recent[(reinterpret_cast<uintptr_t>(caller) >> 2) & 255];
  if (address - s->base >= s->size || address - s->base + size > s->size ||
      (s->space == Space::module && write)) {
    s = find(address, size, write, caller);
    if (!s) {
      // It may straddle two views of one buffer: then byte by byte.
      if (size > 1 && find(address, 1, write, caller) && find(address + size - 1, 1, write, caller)) {
        for (size_t i = 0; i < size; i++) access(address + i, 1, write, caller);
        return;
      }
      out_of_bounds(address, size, write, caller);
    }
  }
  const size_t offset = address - s->base;
  switch (s->space) {
    case Space::threadgroup:
      return write ? threadgroup<true>(offset, size, caller) : threadgroup<false>(offset, size, caller);
    case Space::module: return;
    default:
      if (write && s->space == Space::device_readonly)
        finding("writes to read-only " + where(*s, offset), caller);
      return write ? device<true>(*s, offset, size, caller) : device<false>(*s, offset, size, caller);
  }
}

__attribute__((always_inline)) inline void Memory::aligned_access(uintptr_t address, size_t size, bool write,
                                                                  const void* caller) {
  if (address & (size - 1)) misaligned(address, size, write, caller);
  access(address, size, write, caller);
}

void Memory::read_by(Reader reader, uintptr_t address, size_t size) {
  const Place own = here;
  const Stamp since = own.stamp & ~Stamp(code_mask);
  if (reader == Reader::simdgroup) here.stamp = since | (code_simdgroup + own.simdgroup);
  if (reader == Reader::threadgroup) {
    here.stamp = epoch << code_bits | code_many;
    here.simdgroup = ~0u;
    here.simd_ordered[0] = here.simd_ordered[1] = 0;
  }
  access(address, size, false, nullptr);
  here = own;
}

void Memory::misaligned(uintptr_t address, size_t size, bool write, const void* caller) {
  if (private_memory.has(address)) return;
  Segment* s = find(address, size, write, caller);
  if (!s) out_of_bounds(address, size, write, caller);
  if (s->space == Space::module) return;
  finding(std::string("misaligned ") + (write ? "write" : "read") + " of " + std::to_string(size) +
              " bytes: " + where(*s, address - s->base),
          caller);
}

void Memory::atomic(uintptr_t address, unsigned size, bool write, const void* caller) {
  atomics++;
  spins = here.stamp == spinning ? spins + 1 : 0;
  spinning = here.stamp;
  if (spins > spin_limit)
    finding("spins on an atomic: no thread is promised to run while another waits for it", caller);
  Segment* s = find(address, size, write, caller);
  if (!s || s->space == Space::module) out_of_bounds(address, size, write, caller);
  const size_t offset = address - s->base;
  if (address % size) finding("misaligned atomic access to " + where(*s, offset), caller);
  if (s->space == Space::threadgroup) {
    threadgroup_accesses++;
    // An atomic update of memory that was never written adds to garbage.
    write ? check<true>(*s, offset, size, true, caller) : check<false>(*s, offset, size, true, caller);
    return;
  }
  s->touched[offset >> chunk_shift] = 1;
  s->traffic.bytes_read += size;
  mark(s->read_bits, offset, size);
  if (s->space == Space::device_readonly) {
    if (write) finding("writes to read-only " + where(*s, offset), caller);
    return;
  }
  if (write) {
    s->traffic.bytes_written += size;
    mark(s->write_bits, offset, size);
  }
  write ? check<true>(*s, offset, size, true, caller) : check<false>(*s, offset, size, true, caller);
}

void Memory::clear(Segment& s) {
  const size_t chunk = size_t(1) << chunk_shift;
  for (size_t c = 0; c << chunk_shift < s.size; c++) {
    if (!s.touched[c]) continue;
    s.touched[c] = 0;
    const size_t start = c << chunk_shift, bytes = std::min(chunk, s.size - start),
                 words = (bytes + 63) / 64 * 8;
    memset(s.read_bits + start / 64, 0, words + 8);
    if (s.space != Space::device) continue;
    memset(s.write_bits + start / 64, 0, words + 8);
    memset(s.reads + start, 0, bytes * sizeof(Stamp));
    memset(s.writes + start, 0, bytes * sizeof(Stamp));
  }
}

namespace {
bool has(const uint64_t* bits, size_t at) {
  return bits && bits[at >> 6] >> (at & 63) & 1;
}
}  // namespace

const Segment* Memory::of_binding(int binding) const {
  for (const Segment& s : segments)
    if (s.binding == binding) return &s;
  return nullptr;
}

bool Memory::is_accessed(int binding) const {
  const Segment* s = of_binding(binding);
  return s && (s->traffic.bytes_read || s->traffic.bytes_written);
}

long Memory::first_conflict(int writer, int other, long shift) const {
  const Segment *a = of_binding(writer), *b = of_binding(other);
  if (!a || !b) return -1;
  for (long i = std::max(0l, -shift); i < long(a->size) && i + shift < long(b->size); i++)
    if (has(a->write_bits, i) && (has(b->read_bits, i + shift) || has(b->write_bits, i + shift))) return i;
  return -1;
}

void Memory::end(msl_counters& counters) {
  for (Segment& s : segments) {
    if (s.binding < 0 || !s.touched) continue;
    msl_traffic& t = counters.buffers[s.binding];
    for (size_t c = 0; c << chunk_shift < s.size; c++) {
      if (!s.touched[c]) continue;
      const size_t first = (c << chunk_shift) / 64,
                   last = std::min(first + ((size_t(1) << chunk_shift) / 64), s.size / 64 + 1);
      for (size_t i = first; i < last; i++) {
        s.traffic.distinct_bytes_read += __builtin_popcountll(s.read_bits[i]);
        if (s.write_bits) s.traffic.distinct_bytes_written += __builtin_popcountll(s.write_bits[i]);
      }
    }
    t.bytes_read += s.traffic.bytes_read;
    t.bytes_written += s.traffic.bytes_written;
    t.distinct_bytes_read += s.traffic.distinct_bytes_read;
    t.distinct_bytes_written += s.traffic.distinct_bytes_written;
    clear(s);
  }
  counters.threadgroup_accesses += threadgroup_accesses;
  counters.atomics += atomics;
  segments.clear();
  dispatch = nullptr;
}

const msl_argument* buffer_argument(const msl_kernel& kernel, int index) {
  for (int i = 0; i < kernel.argument_count; i++) {
    const msl_argument& a = kernel.arguments[i];
    if (a.kind == MSL_BUFFER && a.index == index) return &a;
  }
  return nullptr;
}

std::string Memory::where(const Segment& s, size_t offset) const {
  if (s.space == Space::threadgroup) {
    const ThreadgroupVariable* nearest = nullptr;
    for (const auto& v : variables)
      if (v.offset <= offset || !nearest) nearest = &v;
    if (!nearest) return "threadgroup memory, of which the kernel has none";
    return "threadgroup memory '" + nearest->name + "' at byte " +
           std::to_string(long(offset) - long(nearest->offset)) + " of " + std::to_string(nearest->size);
  }
  const msl_binding& bound = dispatch->buffers[s.binding];
  const msl_argument* argument = buffer_argument(*dispatch->kernel, s.binding);
  const long at = long(s.base + offset - reinterpret_cast<uintptr_t>(bound.data));
  return "buffer " + std::to_string(s.binding) + " '" + (argument ? argument->name : "?") + "' at byte " +
         std::to_string(at) + " of " + std::to_string(bound.size);
}

void Memory::out_of_bounds(uintptr_t address, size_t size, bool write, const void* caller) {
  const char* verb = write ? "writes" : "reads";
  const std::string bytes = std::string(verb) + " " + std::to_string(size) + " bytes out of bounds: ";
  if (address - segments[0].base < arena_size)
    finding(bytes + where(segments[0], address - segments[0].base), caller);
  if (address < 4096) finding(bytes + "a null pointer", caller);
  const Segment* nearest = nullptr;
  uintptr_t distance = ~uintptr_t(0);
  for (const Segment& s : segments) {
    if (s.binding < 0) continue;
    const uintptr_t away = address < s.base ? s.base - address : address - (s.base + s.size - 1);
    if (away < distance) distance = away, nearest = &s;
  }
  if (!nearest) finding(bytes + "the kernel has no buffers", caller);
  finding(bytes + where(*nearest, address - nearest->base) + " (the nearest buffer)", caller);
}

void Memory::race(Segment& segment, size_t at, Stamp other, bool other_wrote, bool write, bool atomic,
                  const void* caller) {
  const bool threadgroup = segment.space == Space::threadgroup;
  const Stamp code = code_of(other);
  std::string who;
  if (code < code_simdgroup)
    who = "thread " + thread_name(code);
  else if (code < code_many)
    who = "several threads of simdgroup " + std::to_string(code - code_simdgroup);
  else if (is_atomic(other))
    who = "an atomic operation of simdgroup " + std::to_string(code - code_atomic);
  else
    who = "several threads";
  const bool between_groups = !threadgroup && relation(other, false) == Relation::earlier_group;
  if (between_groups) {
    const long group = code == code_many_groups ? -1 : group_of(other);
    who += group < 0 ? " of other threadgroups" : " of threadgroup " + group_name(group);
  }
  finding(std::string(between_groups ? "race between threadgroups: " : "race within a threadgroup: ") +
              (atomic ? "atomically " : "") + (write ? "writes " : "reads ") + where(segment, at) +
              ", which " + who + (other_wrote ? " wrote" : " read") +
              (between_groups ? " in the same dispatch" : " with no barrier between that orders it"),
          caller);
}

}  // namespace msl

// The compiler's helper for float -> bfloat: to nearest even, NaNs stay NaNs, subnormals are zero.
extern "C" __bf16 __truncsfbf2(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (!(bits & 0x7f800000))
    bits &= 0x80000000;
  else if ((bits & 0x7fffffff) > 0x7f800000)
    bits |= 0x400000;
  else
    bits += 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(bits >> 16));
}

#define MSL_CALLER __builtin_return_address(0)
#define MSL_ADDRESS(p) reinterpret_cast<uintptr_t>(p)
extern "C" {
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
#define MSL_ACCESS(name, check, write, n)                    \
  void __tsan_##name##n(void* p) {                           \
    msl::memory.check(MSL_ADDRESS(p), n, write, MSL_CALLER); \
  }
// clang-format off
#define MSL_ACCESSES(n)                                                                                   \
  MSL_ACCESS(read, aligned_access, false, n) MSL_ACCESS(write, aligned_access, true, n)                   \
  MSL_ACCESS(unaligned_read, access, false, n) MSL_ACCESS(unaligned_write, access, true, n)               \
  MSL_ACCESS(volatile_read, access, false, n) MSL_ACCESS(volatile_write, access, true, n)                 \
  MSL_ACCESS(unaligned_volatile_read, access, false, n) MSL_ACCESS(unaligned_volatile_write, access, true, n)
MSL_ACCESSES(1)
MSL_ACCESSES(2)
MSL_ACCESSES(4)
MSL_ACCESSES(8)
MSL_ACCESSES(16)
// clang-format on

void* __tsan_memmove(void* to, const void* from, size_t n) {
  if (n) {
    msl::memory.access(MSL_ADDRESS(from), n, false, MSL_CALLER);
    msl::memory.access(MSL_ADDRESS(to), n, true, MSL_CALLER);
  }
  return memmove(to, from, n);
}
void* __tsan_memcpy(void* to, const void* from, size_t n) __attribute__((alias("__tsan_memmove")));
void* __tsan_memset(void* to, int value, size_t n) {
  if (n) msl::memory.access(MSL_ADDRESS(to), n, true, MSL_CALLER);
  return memset(to, value, n);
}
}
