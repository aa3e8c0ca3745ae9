// The part of libdispatch that PyTorch's headers name: serial queues and synchronous blocks.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#ifdef __OBJC__
@class NSObject;
@protocol OS_dispatch_queue;
@protocol OS_dispatch_data;
typedef NSObject<OS_dispatch_queue>* dispatch_queue_t;
typedef NSObject<OS_dispatch_data>* dispatch_data_t;
#else
typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;
#endif

typedef void* dispatch_queue_attr_t;
typedef void (*dispatch_function_t)(void*);
typedef long dispatch_once_t;
#define DISPATCH_QUEUE_SERIAL NULL

#ifdef __cplusplus
extern "C" {
#endif
dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t attributes);
void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t function);
#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
void dispatch_once(dispatch_once_t* predicate, dispatch_block_t block);
#endif
#ifdef __cplusplus
}
#endif

// Darwin's clock, used inline by PyTorch's profiler header.
static inline uint64_t clock_gettime_nsec_np(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
