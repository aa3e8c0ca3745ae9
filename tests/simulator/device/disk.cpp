// Reads of files by host code: a test may delay, shorten or fail them.
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#undef preadv

namespace {
// Of a read of so many bytes: how many of them to read, or the negative number of an error.
using Intercept = long (*)(int file, long offset, long size);
std::atomic<Intercept> intercept{nullptr};
}  // namespace

extern "C" void simulator_intercept_reads(Intercept function) {
  intercept = function;
}

extern "C" ssize_t simulator_preadv(int file, const iovec* vectors, int count, off_t offset) {
  const Intercept function = intercept;
  if (function == nullptr) return preadv(file, vectors, count, offset);
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
  return preadv(file, some.data(), static_cast<int>(some.size()), offset);
}
