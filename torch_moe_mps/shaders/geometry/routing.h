// Routing
#pragma once

GEOMETRY kLogitsSimdgroups = 4;
GEOMETRY kLogitsFewExperts = 2;  // experts of a threadgroup for few tokens: fewer give more threadgroups
GEOMETRY kLogitsUnroll = 2;      // vectors of a row that a lane loads at a time
GEOMETRY kLogitsExperts = 4;
GEOMETRY kLogitsTokens = 4;
