// clang's gcc Objective-C runtime gives every function of an Objective-C++ file the personality
// __gnu_objc_personality_v0, and libobjc's version of it cannot catch C++ exceptions. Linked into each
// library that has Objective-C++ code, this hidden one can.
#include <unwind.h>

#include <cstdint>

extern "C" _Unwind_Reason_Code __gxx_personality_v0(int version, _Unwind_Action actions,
                                                    uint64_t exception_class, _Unwind_Exception* exception,
                                                    _Unwind_Context* context);

extern "C" __attribute__((visibility("hidden"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, uint64_t exception_class,
                          _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}
