// Command buffers of torch's streams, and how they end. macOS stops one that keeps the display waiting or
// that memory does not hold; torch waits for it and does not ask how it ended, so that what was in memory
// would pass for its results.
//
// Metal tells how a buffer ended on a thread of its own, some 100 us later, in any order. Everything here is
// known a stream: from torch 2.14 on a thread may have another one than the rest.
//
// Not watched is a buffer that MPSGraph begins and commits within one graph: it holds an operator of torch's
// alone, and only MPSGraph sees it.
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace at::mps {
class MPSStream;
}

namespace moe_mps {

// For Metal to tell how a buffer ended that the host has waited for.
constexpr std::chrono::seconds kToldWithin(30);

// A dispatch, for reports.
struct Launch {
  const char* kernel;              // lives as long as the process
  std::array<int64_t, 3> grid;     // threadgroups; all 0 where an earlier dispatch computes them
  std::array<int64_t, 3> threads;  // of a threadgroup

  bool operator==(const Launch&) const = default;
  std::string text() const;  // "<kernel> grid <threadgroups> of <threads>"
};

// Contents of a command buffer, as the host has encoded it.
struct Work {
  int64_t number = 0;                  // counts the stream's buffers
  std::vector<const char*> operators;  // in the order of their calls
  std::vector<Launch> launches;        // theirs, in order
  double seconds = 0;                  // by estimate
  bool waits_for = false;              // the host's answer to a request
};

// Names the operator of all that the calling thread encodes from here on; the text is never freed.
void name_work(const char* operator_name);

// Has Metal report on the command buffer that the stream encodes into, as one with work of that operator. In
// a block of the stream's queue; the reference is good up to the next commit.
Work& watch_work(at::mps::MPSStream* stream);

// Command buffers of the stream that are not complete, with the one that is encoded into. In a block of the
// stream's queue, behind watch_work.
size_t incomplete_buffers(at::mps::MPSStream* stream);

// Waits until fewer than `most` buffers of the stream are incomplete. Outside of blocks of the stream's
// queue, which others need meanwhile.
void wait_for_room(at::mps::MPSStream* stream, size_t most);

// Waits for all that is encoded on the stream, and hears of it. Outside of blocks of the stream's queue.
void finish(at::mps::MPSStream* stream);

// Waits for a buffer of a stream, as Python has it, and for those before it. Raises their fault.
void wait_for_buffer(int64_t stream, int64_t number);

// Whether the GPU has not finished all that it was given, on any stream. From any thread.
bool has_incomplete_work();

// Stores a fault of the host's, by which what a buffer of the stream computes is lost: it is raised like one
// of the GPU. From any thread.
void report_fault(at::mps::MPSStream* stream, int64_t buffer, const std::string& fault);

// Whether a fault is stored that nobody has raised. From any thread.
bool has_fault();

// Raises torch.AcceleratorError if a command buffer has failed, as far as Metal has told. Each thread whose
// work was lost is told, once for each stream that it uses; what one stream computes, another may read. If no
// thread has been told yet, any thread is: it may wait for another one's work.
void raise_fault();

}  // namespace moe_mps
