// Linear attention
#pragma once

GEOMETRY kConvThreads = 64;
GEOMETRY kConvTokens = 8;          // of a thread, at least
GEOMETRY kScanRows = 16;           // rows of a head's state that a lane holds,
GEOMETRY kScanColumns = 2;         // of so many columns
GEOMETRY kScanSimdgroups = 16;     // the most that share a head, with a norm
GEOMETRY kSliceSimdgroups = 8;     // the most that share a part of a head, without one
GEOMETRY kScanTokens = 16;         // staged at a time for heads of up to 128
GEOMETRY kSelectiveThreads = 128;  // SCANNED_CHANNELS of ops/linear_attention.py
GEOMETRY kSelectiveStates = 16;    // of a channel: MAX_STATES of ops/linear_attention.py
GEOMETRY kSelectiveTokens = 64;    // staged at a time
GEOMETRY kSelectiveUnroll = 4;     // loaded at a time
