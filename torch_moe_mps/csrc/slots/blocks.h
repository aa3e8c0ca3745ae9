// Conversion of ggml's blocks, as in GGUF files, into the tensors of the formats of the same name: the bytes
// are those of `from_blocks` (quantization/gguf.py). Plain C++, for the threads that read experts.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace moe_mps {

// A type of blocks: bytes of one in a file, and in the tensors of codes, scales and zeros. A block of values
// that are not quantised is one value, and its code is this value in the dtype of the tensor.
struct BlockType {
  int64_t bytes, codes, scales, zeros;
  // Converts blocks that lie one after the other, in the file and in each tensor.
  void (*convert)(const char* from, int64_t count, char* codes, char* scales, char* zeros);
};

// The type by ggml's name in lower case, for codes of a dtype; null for one that is not converted.
const BlockType* block_type(const std::string& name, c10::ScalarType dtype);

}  // namespace moe_mps
