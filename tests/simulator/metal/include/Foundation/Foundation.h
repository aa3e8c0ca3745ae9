// The part of Foundation that host code of this package may use, on libobjc (Linux) or as declarations (macOS
// check).
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __APPLE__
#include <objc/NSObject.h>
#include <objc/objc.h>
#else
#include <objc/objc.h>
#include <objc/runtime.h>

#ifdef __cplusplus
// libobjc's nil is (id)0, Apple's converts to every pointer; torch's headers rely on that.
#undef nil
#define nil nullptr
#undef Nil
#define Nil nullptr
#endif

typedef long NSInteger;
typedef unsigned long NSUInteger;

@protocol NSObject
- (Class)class;
- (BOOL)respondsToSelector:(SEL)selector;
- (instancetype)retain;
- (oneway void)release;
- (instancetype)autorelease;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
}
+ (instancetype)alloc;
+ (instancetype)new;
+ (Class)class;
- (instancetype)init;
- (void)dealloc;
@end

// clang lowers @autoreleasepool to this class on the gcc runtime.
@interface NSAutoreleasePool : NSObject
- (void)drain;
+ (void)addObject:(id)object;
@end
#endif

#include <dispatch/dispatch.h>

typedef struct _NSRange {
  NSUInteger location, length;
} NSRange;
static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}

@class NSDictionary;  // named by PyTorch's headers
typedef NSUInteger NSStringEncoding;
enum { NSUTF8StringEncoding = 4 };

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
- (instancetype)initWithUTF8String:(const char*)text;
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)length
                     encoding:(NSStringEncoding)encoding;
- (const char*)UTF8String;
@property(readonly) NSUInteger length;
@end

// The layout of @"literals".
#ifdef __APPLE__
@interface NSConstantString : NSString
@end
#else
@interface NSConstantString : NSString {
 @public
  char* c_str;
  unsigned int len;
}
@end
#endif

@interface NSURL : NSObject {
  NSString* _path;
}
+ (instancetype)fileURLWithPath:(NSString*)path;
@property(readonly, copy) NSString* path;
@end

@interface NSError : NSObject
@property(readonly) NSInteger code;
@property(readonly, copy) NSString* localizedDescription;
@end

@interface NSArray<__covariant ObjectType> : NSObject
+ (instancetype)arrayWithObjects:(const ObjectType[])objects count:(NSUInteger)count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
@property(readonly) NSUInteger count;
@end
