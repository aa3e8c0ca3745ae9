// Tiles of a KV cache in 4 and 2 bits
#pragma once

GEOMETRY kTileTokens = 128;
GEOMETRY kMostTileWidth = 576;  // elements of a head
GEOMETRY kSealThreads = 256;
