// Linked with a counted kernel: how often each block runs in each simdgroup, and what its accesses touch.
//
// A simdgroup runs a block for all lanes that need it, so a block counts as often as the lane that runs it
// most. Accesses of lanes belong together if each is the n-th of its site in the threadgroup.
#include <algorithm>
#include <vector>

#include "../msl/executor.h"
#include "../msl/include/msl_runtime.h"

extern "C" void apple_kernel(void* bindings);  // the kernel with calls of the functions below

extern "C" void apple_tensor_product(void*) {}  // include/msl_tensor.h

namespace {
constexpr unsigned max_threads = 1024, lanes = 32, max_simdgroups = max_threads / lanes;
// As in facts.py.
constexpr uintptr_t sector_bytes = APPLE_SECTOR_BYTES, line_bytes = APPLE_LINE_BYTES;
constexpr uintptr_t cache_line_bytes = APPLE_CACHE_LINE_BYTES, bank_bytes = 4;
constexpr unsigned banks = APPLE_BANKS;
constexpr uintptr_t stack_bytes = 256 << 10;

enum Mode : uint8_t { skipped, counted, traced };
enum Space : uint64_t { unknown, device, constant, threadgroup, in_private, module };

struct Site {  // as in count.py
  int32_t back;
  uint32_t bytes, is_module;
};
struct SiteCount {  // of traced threadgroups; as in count.py
  uint64_t accesses, lanes, sectors, space;
  uint64_t lines;                      // of the cache, that each access touches
  uint64_t bank_cycles, least_cycles;  // of threadgroup memory, and if no two words met in a bank
};
struct Request {  // as in count.py
  uint32_t block_count, site_count;
  const Site* sites;
  const double* block_slots;
  const uint8_t* modes;            // of each threadgroup
  const uint8_t* is_constant;      // of each binding
  uint64_t *blocks, *lane_blocks;  // runs of each block by simdgroups, and by lanes
  SiteCount* site_counts;
  double* group_slots;
};

// A contiguous piece of bound memory; `lines` has a bit for each line that was touched.
struct Region {
  uintptr_t low, high;
  bool is_constant;
  std::vector<uint64_t> lines;
};

Request request;
const uint64_t nowhere = ~0ull;
uint64_t group;
Mode mode;
unsigned thread_count;
std::vector<uint32_t> thread_blocks;       // [thread][block]
std::vector<uint32_t> occurrences;         // [thread][site]
std::vector<std::vector<uintptr_t>> logs;  // [site][simdgroup]: addresses [occurrence][lane]
std::vector<unsigned> used_logs;
std::vector<Region> regions;
std::vector<Region*> site_regions;

void learn_regions(const msl_dispatch& dispatch) {
  std::vector<Region> found;
  for (unsigned i = 0; i < 31; i++) {
    const msl_binding& b = dispatch.buffers[i];
    const auto low = reinterpret_cast<uintptr_t>(b.data);
    if (b.data) found.push_back({low & ~(line_bytes - 1), low + b.size, request.is_constant[i] != 0, {}});
  }
  std::sort(found.begin(), found.end(), [](const Region& a, const Region& b) { return a.low < b.low; });
  for (Region& r : found) {
    if (!regions.empty() && r.low < regions.back().high) {
      regions.back().high = std::max(regions.back().high, r.high);
      regions.back().is_constant &= r.is_constant;
    } else {
      regions.push_back(r);
    }
  }
  for (Region& r : regions) r.lines.resize((r.high - r.low) / line_bytes / 64 + 1);
}

Region* region_of(uintptr_t address) {
  for (Region& r : regions)
    if (address >= r.low && address < r.high) return &r;
  return nullptr;
}

Space space_of(uintptr_t address, unsigned site) {
  if (request.sites[site].is_module) return module;
  if (const Region* r = region_of(address)) return r->is_constant ? constant : device;
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return address + stack_bytes > frame && address < frame + stack_bytes ? in_private : threadgroup;
}

void mark(uintptr_t address, unsigned site) {
  Region* r = site_regions[site];
  if (!r || address < r->low || address >= r->high) r = site_regions[site] = region_of(address);
  if (!r) return;
  const uintptr_t last = (address + request.sites[site].bytes - 1 - r->low) / line_bytes;
  for (uintptr_t line = (address - r->low) / line_bytes; line <= last; line++)
    r->lines[line / 64] |= 1ull << line % 64;
}

void fold_blocks() {
  double& slots = request.group_slots[group];
  for (unsigned first = 0; first < thread_count; first += lanes) {
    const unsigned last = std::min(first + lanes, thread_count);
    for (unsigned b = 0; b < request.block_count; b++) {
      uint32_t most = 0;
      uint64_t sum = 0;
      for (unsigned t = first; t < last; t++) {
        const uint32_t runs = thread_blocks[size_t(t) * request.block_count + b];
        most = std::max(most, runs);
        sum += runs;
      }
      request.blocks[b] += most;
      request.lane_blocks[b] += sum;
      slots += most * request.block_slots[b];
    }
  }
}

// How often the busiest bank serves an access, a word at a time; lanes that ask for one word share it.
void count_banks(SiteCount& count, std::vector<uintptr_t>& words) {
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  unsigned of_bank[banks] = {}, most = 0;
  for (uintptr_t word : words) most = std::max(most, ++of_bank[word % banks]);
  count.bank_cycles += most;
  count.least_cycles += (words.size() + banks - 1) / banks;
}

void fold_log(unsigned number) {
  std::vector<uintptr_t>& log = logs[number];
  SiteCount& count = request.site_counts[number / max_simdgroups];
  const unsigned bytes = request.sites[number / max_simdgroups].bytes;
  std::vector<uintptr_t> sectors, words;
  for (size_t at = 0; at < log.size(); at += lanes) {
    sectors.clear(), words.clear();
    unsigned active = 0;
    for (unsigned lane = 0; lane < lanes; lane++) {
      const uintptr_t address = log[at + lane];
      if (!address) continue;
      active++;
      for (uintptr_t s = address / sector_bytes; s <= (address + bytes - 1) / sector_bytes; s++)
        if (sectors.empty() || sectors.back() != s) sectors.push_back(s);
      if (count.space != threadgroup) continue;
      for (uintptr_t w = address / bank_bytes; w <= (address + bytes - 1) / bank_bytes; w++)
        words.push_back(w);
    }
    if (!active) continue;
    if (!std::is_sorted(sectors.begin(), sectors.end())) std::sort(sectors.begin(), sectors.end());
    sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
    count.sectors += sectors.size();
    uintptr_t line = ~uintptr_t{0};
    for (uintptr_t s : sectors)
      if (s * sector_bytes / cache_line_bytes != line)
        line = s * sector_bytes / cache_line_bytes, count.lines++;
    if (count.space == threadgroup) count_banks(count, words);
    count.lanes += active;
    count.accesses++;
  }
  log.clear();
}

void fold() {
  if (group == nowhere || mode == skipped) return;
  fold_blocks();
  std::fill_n(thread_blocks.begin(), size_t(thread_count) * request.block_count, 0);
  if (mode != traced) return;
  for (unsigned number : used_logs) fold_log(number);
  used_logs.clear();
  std::fill_n(occurrences.begin(), size_t(thread_count) * request.site_count, 0);
}

void enter_group(uint64_t next, const msl_dispatch& dispatch) {
  if (regions.empty()) learn_regions(dispatch);  // a second run of the dispatch is on the same memory
  fold();
  group = next;
  mode = Mode(request.modes[group]);
  thread_count = msl_group.size[0] * msl_group.size[1] * msl_group.size[2];
}
}  // namespace

extern "C" {
// The counters of the running thread's blocks.
uint32_t* apple_thread(void) {
  return &thread_blocks[size_t(msl_self->index) * request.block_count];
}

void apple_access(const void* pointer, uint32_t site) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) - request.sites[site].back;
  uint64_t& space = request.site_counts[site].space;
  if (space == unknown) space = space_of(address, site);
  if (space == device) mark(address, site);
  if (mode != traced) return;
  const size_t occurrence = occurrences[size_t(msl_self->index) * request.site_count + site]++;
  const unsigned number = site * max_simdgroups + msl_self->simdgroup;
  auto& addresses = logs[number];
  if (addresses.empty()) used_logs.push_back(number);
  if (addresses.size() <= occurrence * lanes) addresses.resize((occurrence + 1) * lanes);
  addresses[occurrence * lanes + msl_self->lane] = address;
}

// The entry that the executor runs.
__attribute__((visibility("default"))) void apple_entry(void* bindings) {
  const unsigned* p = msl_group.position;
  const uint64_t here = p[0] + uint64_t(msl_group.count[0]) * (p[1] + uint64_t(msl_group.count[1]) * p[2]);
  if (here != group) enter_group(here, *static_cast<const msl_dispatch*>(bindings));
  if (mode != skipped) apple_kernel(bindings);
}

// A dispatch begins with `fresh`; then it may be run more than once, each time with other threadgroups.
__attribute__((visibility("default"))) void apple_begin(const Request* r, int fresh) {
  request = *r;
  group = nowhere;
  thread_blocks.assign(size_t(max_threads) * request.block_count, 0);
  occurrences.assign(size_t(max_threads) * request.site_count, 0);
  logs.resize(size_t(request.site_count) * max_simdgroups);
  site_regions.assign(request.site_count, nullptr);
  if (fresh) regions.clear();
}

__attribute__((visibility("default"))) void apple_end(void) {
  fold();
  group = nowhere;
}

// Bytes of device memory in lines that were touched.
__attribute__((visibility("default"))) uint64_t apple_distinct_bytes(void) {
  uint64_t lines = 0;
  for (const Region& r : regions)
    if (!r.is_constant)
      for (uint64_t word : r.lines) lines += __builtin_popcountll(word);
  return lines * line_bytes;
}
}
