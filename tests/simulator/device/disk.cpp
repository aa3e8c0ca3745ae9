// Reads of files by host code: a test may delay, shorten or fail them.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "../metal/runtime.h"

#undef preadv

namespace {
// Of a read of so many bytes: how many of them to read, or the negative number of an error.
using Intercept = long (*)(int file, long offset, long size);
std::atomic<Intercept> intercept{nullptr};

// The kernel's writes fail where pages are closed, rather than fault.
ssize_t read_and_copy(int file, const std::vector<iovec>& vectors, off_t offset) {
  const auto is_guarded = [](const iovec& each) { return simulator::is_for_host(each.iov_base); };
  const int count = static_cast<int>(vectors.size());
  if (std::none_of(vectors.begin(), vectors.end(), is_guarded))
    return preadv(file, vectors.data(), count, offset);
  size_t size = 0;
  for (const iovec& each : vectors) size += each.iov_len;
  std::vector<char> bytes(size);
  const ssize_t result = pread(file, bytes.data(), size, offset);
  const char* from = bytes.data();
  size_t left = result < 0 ? 0 : static_cast<size_t>(result);
  for (const iovec& each : vectors) {
    const size_t some = std::min(left, each.iov_len);
    if (!simulator::host_copies(each.iov_base, from, some))
      std::copy_n(from, some, static_cast<char*>(each.iov_base));
    from += some;
    left -= some;
  }
  return result;
}
}  // namespace

extern "C" void simulator_intercept_reads(Intercept function) {
  intercept = function;
}

extern "C" ssize_t simulator_preadv(int file, const iovec* vectors, int count, off_t offset) {
  const Intercept function = intercept;
  if (function == nullptr) return read_and_copy(file, {vectors, vectors + count}, offset);
  long size = 0;
  for (int n = 0; n < count; ++n) size += static_cast<long>(vectors[n].iov_len);
  long taken = function(file, offset, size);
  if (taken < 0) {
    errno = static_cast<int>(-taken);
    return -1;
  }
  std::vector<iovec> some;
  for (int n = 0; n < count && taken > 0; ++n) {
    some.push_back({vectors[n].iov_base, std::min(vectors[n].iov_len, static_cast<size_t>(taken))});
    taken -= static_cast<long>(some.back().iov_len);
  }
  return read_and_copy(file, some, offset);
}
