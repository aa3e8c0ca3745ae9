// The part of libdispatch that PyTorch's headers name: serial queues and synchronous blocks.
#pragma once
#ifdef __OBJC__
@class NSObject;
@protocol OS_dispatch_queue;
typedef NSObject<OS_dispatch_queue>* dispatch_queue_t;
#else
typedef struct dispatch_queue_s* dispatch_queue_t;
#endif

typedef void* dispatch_queue_attr_t;
#define DISPATCH_QUEUE_SERIAL NULL

#ifdef __cplusplus
extern "C" {
#endif
dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t attributes);
#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
#endif
#ifdef __cplusplus
}
#endif
