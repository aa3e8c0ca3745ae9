// Pooling
#pragma once

// A thread takes two channels of an entry, MAX_POOLED_WIDTH of ops/families/pooling.py at most.
GEOMETRY kPoolThreads = 768;
GEOMETRY kPoolTokens = 16;  // of a window, at least, that a thread takes
