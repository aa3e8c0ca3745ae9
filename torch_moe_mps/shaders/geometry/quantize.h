// Quantising
#pragma once

GEOMETRY kQuantizeThreads = 256;
GEOMETRY kQuantized = 16;  // weights of a thread: the smallest group, and whole ushorts of codes
