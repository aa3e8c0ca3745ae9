// Hyper-connections
#pragma once

GEOMETRY kMaxStreams = 4;  // MAX_STREAMS of ops/families/hyper_connection.py
GEOMETRY kMaxHyperRows = (2 + kMaxStreams) * kMaxStreams;
GEOMETRY kHyperThreads = 256;
GEOMETRY kHyperColumns = 128;  // of a threadgroup: four for each lane
GEOMETRY kHyperTokens = 8;     // that share the loads of weights
