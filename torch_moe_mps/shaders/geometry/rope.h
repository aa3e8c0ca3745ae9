// Rotary position embedding
#pragma once

// A threadgroup takes this many heads, each simdgroup one.
GEOMETRY kRopeHeads = 4;
