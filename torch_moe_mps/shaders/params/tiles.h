// Attention to tiles of 4 and 2 bits, and quantising these: behind params/attention.h
#pragma once

// Keys or values of a cache.
struct TileParams {
  TokenStrides tiles;    // in words; a "token" is a tile
  uint32_t width;        // codes of a token
  uint32_t numbers;      // words of a tile in front of its scales
  uint32_t has_factors;  // of tokens, behind scales and zero points
};

// The dense tokens are those of attention.k and attention.v.
struct TiledParams {
  AttentionParams attention;
  TileParams k;
  TileParams v;
  uint32_t left_out;     // tokens that are in no dense row, from token 128 on
  uint32_t tile_blocks;  // blocks of queries of 128 tokens
  uint32_t first_block;  // of the dispatch
};

// Strides are in elements, those of tiles in words.
struct SealParams {
  TokenStrides states;
  TileParams tiles;
  uint32_t heads;
  uint32_t start;  // the tile that the first new one becomes
};
