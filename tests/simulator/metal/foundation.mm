// Foundation on libobjc: reference counts, autorelease pools, and the few value classes that host code uses.
#import <Foundation/Foundation.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
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
- (NSUInteger)retainCount {
  return static_cast<NSUInteger>(header(self)->references.load());
}
- (BOOL)isEqual:(id)object {
  return object == self;
}
- (NSUInteger)hash {
  return reinterpret_cast<NSUInteger>((void*)self);
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isKindOfClass:(Class)aClass {
  for (Class c = object_getClass(self); c; c = class_getSuperclass(c)) {
    if (c == aClass) return YES;
  }
  return NO;
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
+ (instancetype)stringWithCString:(const char*)text encoding:(NSStringEncoding)encoding {
  return [self stringWithUTF8String:text];
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
- (BOOL)isEqualToString:(NSString*)other {
  return strcmp([self UTF8String], [other UTF8String]) == 0;
}
- (BOOL)isEqual:(id)object {
  return [object isKindOfClass:[NSString class]] && [self isEqualToString:object];
}
- (NSUInteger)hash {
  return std::hash<std::string>()([self UTF8String]);
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

NSString* const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@interface SimulatorNSError : NSError {
 @public
  NSInteger number;
  NSString* domainName;
  NSString* text;
}
@end
@implementation NSError
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary*)userInfo {
  SimulatorNSError* error = [SimulatorNSError new];
  NSString* text = [userInfo objectForKey:NSLocalizedDescriptionKey];
  error->number = code;
  error->domainName = [domain retain];
  error->text = [(text ? text : domain) retain];
  return [error autorelease];
}
- (NSInteger)code {
  return 0;
}
- (NSErrorDomain)domain {
  return @"";
}
- (NSString*)localizedDescription {
  return @"";
}
@end
@implementation SimulatorNSError
- (NSInteger)code {
  return number;
}
- (NSErrorDomain)domain {
  return domainName;
}
- (NSString*)localizedDescription {
  return text;
}
- (void)dealloc {
  [domainName release];
  [text release];
  [super dealloc];
}
@end

@interface SimulatorURL : NSURL {
 @public
  NSString* location;
}
@end
@implementation NSURL
+ (instancetype)fileURLWithPath:(NSString*)path {
  SimulatorURL* url = [SimulatorURL new];
  url->location = [path retain];
  return [url autorelease];
}
- (NSString*)path {
  return @"";
}
@end
@implementation SimulatorURL
- (NSString*)path {
  return location;
}
- (void)dealloc {
  [location release];
  [super dealloc];
}
@end

@interface SimulatorNumber : NSNumber {
 @public
  long value;
}
@end
@implementation NSNumber
+ (NSNumber*)numberWithLong:(long)value {
  SimulatorNumber* number = [SimulatorNumber new];
  number->value = value;
  return [number autorelease];
}
+ (NSNumber*)numberWithInt:(int)value {
  return [self numberWithLong:value];
}
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value {
  return [self numberWithLong:static_cast<long>(value)];
}
+ (NSNumber*)numberWithBool:(BOOL)value {
  return [self numberWithLong:value];
}
- (long)longValue {
  return 0;
}
- (int)intValue {
  return static_cast<int>([self longValue]);
}
- (BOOL)boolValue {
  return [self longValue] != 0;
}
- (NSUInteger)unsignedIntegerValue {
  return static_cast<NSUInteger>([self longValue]);
}
- (BOOL)isEqual:(id)object {
  return [object isKindOfClass:[NSNumber class]] && [self longValue] == [(NSNumber*)object longValue];
}
- (NSUInteger)hash {
  return static_cast<NSUInteger>([self longValue]);
}
@end
@implementation SimulatorNumber
- (long)longValue {
  return value;
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
- (id)objectAtIndexedSubscript:(NSUInteger)index {
  return [self objectAtIndex:index];
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

@interface SimulatorDictionary : NSDictionary {
 @public
  std::vector<std::pair<id, id>>* items;
}
@end
@implementation NSDictionary
+ (instancetype)dictionaryWithObject:(id)object forKey:(id)key {
  return [self dictionaryWithObjects:&object forKeys:&key count:1];
}
+ (instancetype)dictionaryWithObjects:(const id[])objects forKeys:(const id[])keys count:(NSUInteger)count {
  SimulatorDictionary* dictionary = [SimulatorDictionary new];
  dictionary->items = new std::vector<std::pair<id, id>>();
  for (NSUInteger i = 0; i < count; i++) {
    dictionary->items->emplace_back([keys[i] retain], [objects[i] retain]);
  }
  return [dictionary autorelease];
}
- (id)objectForKey:(id)key {
  return nil;
}
- (NSArray*)allKeys {
  return [NSArray arrayWithObjects:nullptr count:0];
}
- (NSUInteger)count {
  return 0;
}
@end
@implementation SimulatorDictionary
- (id)objectForKey:(id)key {
  for (auto& [k, value] : *items) {
    if ([k isEqual:key]) return value;
  }
  return nil;
}
- (NSArray*)allKeys {
  std::vector<id> keys;
  for (auto& item : *items) keys.push_back(item.first);
  return [NSArray arrayWithObjects:keys.data() count:keys.size()];
}
- (NSUInteger)count {
  return items->size();
}
- (void)dealloc {
  for (auto& [key, value] : *items) {
    [key release];
    [value release];
  }
  delete items;
  [super dealloc];
}
@end

void NSLog(NSString* format, ...) {
  // The format is printed as it is: host code that logs here is being debugged, and printf's %@ does not
  // exist.
  fprintf(stderr, "%s\n", [format UTF8String]);
}
