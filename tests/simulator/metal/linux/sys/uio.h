// preadv of host code, which a test may delay, shorten or fail.
#pragma once
#include_next <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif
ssize_t simulator_preadv(int file, const struct iovec* vectors, int count, off_t offset);
#ifdef __cplusplus
}
#endif
#define preadv simulator_preadv
