// Foundation on libobjc: reference counts, autorelease pools, and the few value classes that host code uses.
#import <Foundation/Foundation.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "foundation.h"
#include "runtime.h"

#pragma clang diagnostic ignored "-Wobjc-missing-super-calls"

namespace {

// Lies in front of each object. 16 bytes, so that objects keep malloc's alignment.
struct Header {
  std::atomic<long> references;
  long padding;
};
Header* header(id object) {
  return reinterpret_cast<Header*>((__bridge void*)object) - 1;
}

struct Pool {
  NSAutoreleasePool* object;
  std::vector<id> contents;
};
// Innermost pool last. A pool that an exception jumped over ends with the pool around it, as on macOS.
thread_local std::vector<Pool> pools;

std::atomic<long> objects{0};

}  // namespace

namespace simulator {
long live_objects() {
  return objects;
}
void keep_for_the_process(id object) {
  objects--;
}
size_t pool_depth() {
  return pools.size();
}
void drain_pools(size_t depth) {
  while (pools.size() > depth) {
    const Pool pool = std::move(pools.back());
    pools.pop_back();
    for (id object : pool.contents) [object release];
    [pool.object dealloc];
  }
}
}  // namespace simulator

@implementation NSObject
+ (instancetype)alloc {
  char* memory = static_cast<char*>(calloc(1, sizeof(Header) + class_getInstanceSize(self)));
  id object = (id)(memory + sizeof(Header));
  header(object)->references = 1;
  objects++;
  *reinterpret_cast<Class*>((void*)object) = self;
  return object;
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
// A class is an object too: retaining and releasing it does nothing.
+ (id)retain {
  return self;
}
+ (oneway void)release {
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  objects--;
  free(header(self));
}
- (instancetype)retain {
  header(self)->references++;
  return self;
}
- (oneway void)release {
  if (--header(self)->references == 0) [self dealloc];
}
- (instancetype)autorelease {
  [NSAutoreleasePool addObject:self];
  return self;
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)respondsToSelector:(SEL)selector {
  return class_respondsToSelector(object_getClass(self), selector);
}
@end

@interface SimulatorPool : NSAutoreleasePool {
 @public
  size_t depth;
}
@end
@implementation NSAutoreleasePool
+ (instancetype)alloc {
  return self == [NSAutoreleasePool class] ? (id)[SimulatorPool alloc] : [super alloc];
}
+ (void)addObject:(id)object {
  if (pools.empty()) {
    simulator::report(std::string("an object of class ") + object_getClassName(object) +
                      " is autoreleased where no @autoreleasepool is open: it leaks");
    return;
  }
  pools.back().contents.push_back(object);
}
- (void)drain {
}
@end
@implementation SimulatorPool
- (instancetype)init {
  depth = pools.size();
  pools.push_back({self, {}});
  return self;
}
- (void)drain {
  simulator::drain_pools(depth);
}
- (oneway void)release {
  [self drain];
}
@end

@interface SimulatorString : NSString {
 @public
  std::string* text;
}
@end
@implementation NSString
+ (instancetype)alloc {
  return self == [NSString class] ? (id)[SimulatorString alloc] : [super alloc];
}
+ (instancetype)stringWithUTF8String:(const char*)text {
  return [[[self alloc] initWithUTF8String:text] autorelease];
}
- (instancetype)initWithUTF8String:(const char*)text {
  return [self initWithBytes:text length:strlen(text) encoding:NSUTF8StringEncoding];
}
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)length
                     encoding:(NSStringEncoding)encoding {
  return self;
}
- (const char*)UTF8String {
  return "";
}
- (NSUInteger)length {
  return strlen([self UTF8String]);
}
@end
@implementation SimulatorString
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)length
                     encoding:(NSStringEncoding)encoding {
  text = new std::string(static_cast<const char*>(bytes), length);
  return self;
}
- (const char*)UTF8String {
  return text->c_str();
}
- (void)dealloc {
  delete text;
  [super dealloc];
}
@end

@implementation NSConstantString
- (const char*)UTF8String {
  return c_str;
}
- (instancetype)retain {
  return self;
}
- (oneway void)release {
}
- (instancetype)autorelease {
  return self;
}
@end

@interface SimulatorError : NSError {
 @public
  NSString* text;
  NSInteger number;
}
@end
@implementation NSError
- (NSInteger)code {
  return 0;
}
- (NSString*)localizedDescription {
  return @"";
}
@end
@implementation SimulatorError
- (NSInteger)code {
  return number;
}
- (NSString*)localizedDescription {
  return text;
}
- (void)dealloc {
  [text release];
  [super dealloc];
}
@end

NSError* simulated_error(const std::string& message, long code) {
  SimulatorError* error = [SimulatorError new];
  error->number = code;
  error->text = [[NSString alloc] initWithUTF8String:message.c_str()];
  return [error autorelease];
}

@implementation NSURL
+ (instancetype)fileURLWithPath:(NSString*)path {
  NSURL* url = [NSURL new];
  url->_path = [path retain];
  return [url autorelease];
}
- (NSString*)path {
  return _path;
}
- (void)dealloc {
  [_path release];
  [super dealloc];
}
@end

@interface SimulatorArray : NSArray {
 @public
  std::vector<id>* items;
}
@end
@implementation NSArray
+ (instancetype)arrayWithObjects:(const id[])objects count:(NSUInteger)count {
  SimulatorArray* array = [SimulatorArray new];
  array->items = new std::vector<id>(objects, objects + count);
  for (id item : *array->items) [item retain];
  return [array autorelease];
}
- (id)objectAtIndex:(NSUInteger)index {
  return nil;
}
- (NSUInteger)count {
  return 0;
}
@end
@implementation SimulatorArray
- (id)objectAtIndex:(NSUInteger)index {
  if (index >= items->size()) {
    simulator::fail("NSArray: index " + std::to_string(index) + " is out of range, count is " +
                    std::to_string(items->size()));
  }
  return (*items)[index];
}
- (NSUInteger)count {
  return items->size();
}
- (void)dealloc {
  for (id item : *items) [item release];
  delete items;
  [super dealloc];
}
@end
