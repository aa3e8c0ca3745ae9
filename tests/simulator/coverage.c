// What a kernel compiled with coverage needs of LLVM's profile runtime: its counters, written as a raw profile.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

extern char __start___llvm_prf_data[] __attribute__((weak, visibility("hidden")));
extern char __stop___llvm_prf_data[] __attribute__((weak, visibility("hidden")));
extern char __start___llvm_prf_cnts[] __attribute__((weak, visibility("hidden")));
extern char __stop___llvm_prf_cnts[] __attribute__((weak, visibility("hidden")));
extern char __start___llvm_prf_names[] __attribute__((weak, visibility("hidden")));
extern char __stop___llvm_prf_names[] __attribute__((weak, visibility("hidden")));

int __llvm_profile_runtime;

enum { VERSION = 10, DATA_BYTES = 64 };  // of LLVM 19

void coverage_reset(void) {
  memset(__start___llvm_prf_cnts, 0, __stop___llvm_prf_cnts - __start___llvm_prf_cnts);
}

// Returns 0, or 1 where the file cannot be written.
int coverage_write(const char* path) {
  const uint64_t data = __stop___llvm_prf_data - __start___llvm_prf_data;
  const uint64_t counters = __stop___llvm_prf_cnts - __start___llvm_prf_cnts;
  const uint64_t names = __stop___llvm_prf_names - __start___llvm_prf_names;
  const uint64_t magic = (uint64_t)255 << 56 | (uint64_t)'l' << 48 | (uint64_t)'p' << 40 |
                         (uint64_t)'r' << 32 | (uint64_t)'o' << 24 | (uint64_t)'f' << 16 |
                         (uint64_t)'r' << 8 | 129;
  const uint64_t header[16] = {
      [0] = magic,
      [1] = VERSION,
      [3] = data / DATA_BYTES,
      [5] = counters / 8,
      [9] = names,
      [10] = (uint64_t)(__start___llvm_prf_cnts - __start___llvm_prf_data),
      [12] = (uint64_t)(uintptr_t)__start___llvm_prf_names,
      [15] = 2,
  };
  static const char zeros[8];
  FILE* file = fopen(path, "wb");
  if (!file) return 1;
  fwrite(header, sizeof header, 1, file);
  fwrite(__start___llvm_prf_data, data, 1, file);
  fwrite(__start___llvm_prf_cnts, counters, 1, file);
  fwrite(__start___llvm_prf_names, names, 1, file);
  fwrite(zeros, -names & 7, 1, file);
  return fclose(file) != 0;
}
