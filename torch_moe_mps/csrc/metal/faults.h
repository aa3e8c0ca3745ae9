// Command buffers that fail. macOS stops one that keeps the display waiting or that memory does not hold;
// torch waits for it and does not ask how it ended, so that what was in memory would pass for its results.
#pragma once

namespace at::mps {
class MPSStream;
}

namespace moe_mps {

// What the calling thread encodes from here on belongs to this operator; the text is never freed.
void name_work(const char* operator_name);

// Has Metal report on the command buffer that the stream encodes into, as one with work of that operator. In
// a block of the stream's queue.
// Returns: whether it had none before.
bool watch_work(at::mps::MPSStream* stream);

// Whether a command buffer waits behind the one that the GPU runs. In a block of the stream's queue, behind
// watch_work.
bool has_queued_work();

// Raises torch.AcceleratorError if a command buffer has failed since the last one that was raised.
void raise_fault();

}  // namespace moe_mps
