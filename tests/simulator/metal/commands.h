// What Python asks the Metal runtime for. Plain C, for ctypes.
#pragma once
#include "../msl/executor.h"

extern "C" {
typedef int (*simulator_execute)(const msl_dispatch*, msl_counters*, char*, size_t);

typedef struct {
  const char* kernel;
  msl_counters counters;
} simulator_dispatch_counters;

void simulator_set_executor(simulator_execute execute);
void simulator_set_schedule(uint64_t seed);
// Whether the GPU has a thread of its own, which runs what is committed while the host goes on.
// `watchdog`: seconds of the real clock after which macOS ends a buffer that waits for an event; 0: never.
void simulator_run_alone(int on, uint64_t seed, double watchdog);
// Ends the buffer of the thread's stream as MPSGraph may, which tells no host code.
void simulator_commit_unseen(void);
// The most threads that pipelines allow from now on.
void simulator_limit_pipelines(size_t threads);
// Whether commands are dropped where they would run, and whether they are validated when they are encoded.
void simulator_set_dropping(int dropping, int validating);
// After so many more command buffers `count` fail, with an error of this code; 0 calls it off.
void simulator_fail_buffer(uint64_t after, int code, uint64_t count);
int simulator_has_failed(void);  // since then
// A command buffer that needs more bytes than these at once fails.
void simulator_limit_working_set(size_t bytes);
// Seconds by which the GPU's clock moves on.
void simulator_advance_clock(double seconds);
// Whether the host has a clock beside the GPU's, how many seconds it takes to encode a command or an operator
// of aten, and how many the GPU takes for such an operator.
void simulator_time_host(int timed, double a_command, double an_operator);
void simulator_advance_host(double seconds);
double simulator_host_clock(void);
double simulator_clock(void);  // of the GPU
double simulator_idle(void);   // seconds that the GPU has waited for the host since then
// Seconds from a signal of an event until it is heard of, and those that the GPU has waited for signals.
void simulator_time_events(double an_event, double an_end);
double simulator_waited(void);
void simulator_advance_answer(double seconds);  // of the host's thread that answers signals
double simulator_answer_clock(void);
void simulator_limit_waits(double seconds);  // of the real clock: a longer wait for an event is a finding
// Drops recorded commands and findings.
void simulator_reset(void);
void simulator_trace_start(void);
// One command a line. Valid until the next call.
const char* simulator_trace_stop(void);
void simulator_counters_start(void);
// Valid until counting starts again.
const simulator_dispatch_counters* simulator_counters_stop(size_t* count);
// Where an MTLBuffer's bytes lie.
void* simulator_contents(const void* buffer);
// How often host code has committed the stream.
uint64_t simulator_commits(void);
size_t simulator_live_buffers(void);
long simulator_live_objects(void);
}
