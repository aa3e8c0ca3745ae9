// The queries of a block.
#pragma once
#include "common.h"
#include "params/attention.h"

// Query r of the block: (token, head of the key head's group), with the heads of a token side by side.
struct Queries {
  uint batch, key_head, group_heads;
  uint first, count;
  bool one_token;  // which saves divisions: they take as long as many keys of a short chunk
  uint only;       // that token

  uint token(uint r) const { return one_token ? only : (first + r) / group_heads; }
  uint head(uint r, uint token) const {
    return key_head * group_heads + (one_token ? first + r : first + r - token * group_heads);
  }
  uint head(uint r) const { return head(r, token(r)); }
  bool has(uint r) const { return first + r < count; }
  // The row of the results, for a token that is known.
  uint row(uint r, uint token, constant AttentionParams& params) const {
    return (batch * params.tokens + token) * params.heads + head(r, token);
  }
};

// Queries of a threadgroup; where tokens select their keys, those of a block are of one token.
template <bool kSelects>
inline Queries queries_of_block(uint3 group, uint size, constant AttentionParams& params) {
  const uint group_heads = params.heads / params.key_heads;
  const uint batch = group.z / params.key_heads, key_head = group.z % params.key_heads;
  if constexpr (kSelects) {
    const uint blocks = (group_heads + size - 1) / size, token = group.y / blocks;
    return {batch, key_head, group_heads, group.y % blocks * size, group_heads, true, token};
  } else {
    const uint count = group_heads * params.tokens;
    return {batch, key_head, group_heads, group.y * size, count, params.tokens == 1, 0};
  }
}
