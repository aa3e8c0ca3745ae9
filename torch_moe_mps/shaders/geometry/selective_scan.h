// Mamba-1's selective scan
#pragma once

GEOMETRY kSelectiveThreads = 128;  // SCANNED_CHANNELS of ops/families/selective_scan.py
GEOMETRY kSelectiveStates = 16;    // of a channel: MAX_STATES of ops/families/selective_scan.py
GEOMETRY kSelectiveTokens = 64;    // staged at a time
GEOMETRY kSelectiveUnroll = 4;     // loaded at a time
