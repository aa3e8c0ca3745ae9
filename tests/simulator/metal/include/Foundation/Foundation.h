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
- (BOOL)isEqual:(id)object;
- (NSUInteger)hash;
- (Class)class;
- (BOOL)isKindOfClass:(Class)aClass;
- (BOOL)respondsToSelector:(SEL)selector;
- (instancetype)retain;
- (oneway void)release;
- (instancetype)autorelease;
- (NSUInteger)retainCount;
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

#ifdef __cplusplus
#define FOUNDATION_EXPORT extern "C"
#else
#define FOUNDATION_EXPORT extern
#endif
#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_OPTIONS(type, name) \
  enum name : type name;       \
  enum name : type

typedef double NSTimeInterval;
typedef struct _NSRange {
  NSUInteger location, length;
} NSRange;
static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}

@class NSArray, NSData, NSDictionary, NSError, NSNumber, NSString, NSURL;
typedef NSUInteger NSStringEncoding;
enum { NSUTF8StringEncoding = 4 };
typedef NSString* NSErrorDomain;

@protocol NSCopying
@end

@interface NSString : NSObject <NSCopying>
+ (instancetype)stringWithUTF8String:(const char*)text;
+ (instancetype)stringWithCString:(const char*)text encoding:(NSStringEncoding)encoding;
- (instancetype)initWithUTF8String:(const char*)text;
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)length
                     encoding:(NSStringEncoding)encoding;
- (BOOL)isEqualToString:(NSString*)other;
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

@interface NSError : NSObject
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary*)userInfo;
@property(readonly) NSInteger code;
@property(readonly, copy) NSErrorDomain domain;
@property(readonly, copy) NSString* localizedDescription;
@end
FOUNDATION_EXPORT NSString* const NSLocalizedDescriptionKey;

@interface NSURL : NSObject
+ (instancetype)fileURLWithPath:(NSString*)path;
@property(readonly, copy) NSString* path;
@end

@interface NSNumber : NSObject <NSCopying>
+ (NSNumber*)numberWithBool:(BOOL)value;
+ (NSNumber*)numberWithInt:(int)value;
+ (NSNumber*)numberWithLong:(long)value;
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value;
@property(readonly) BOOL boolValue;
@property(readonly) int intValue;
@property(readonly) long longValue;
@property(readonly) NSUInteger unsignedIntegerValue;
@end

@interface NSArray<__covariant ObjectType> : NSObject
+ (instancetype)arrayWithObjects:(const ObjectType[])objects count:(NSUInteger)count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
- (ObjectType)objectAtIndexedSubscript:(NSUInteger)index;
@property(readonly) NSUInteger count;
@end

@interface NSDictionary<__covariant KeyType, __covariant ObjectType> : NSObject
+ (instancetype)dictionaryWithObject:(ObjectType)object forKey:(KeyType)key;
+ (instancetype)dictionaryWithObjects:(const ObjectType[])objects
                              forKeys:(const KeyType[])keys
                                count:(NSUInteger)count;
- (ObjectType)objectForKey:(KeyType)key;
- (NSArray<KeyType>*)allKeys;
@property(readonly) NSUInteger count;
@end

FOUNDATION_EXPORT void NSLog(NSString* format, ...);
