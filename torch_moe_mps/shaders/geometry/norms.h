// Norms
#pragma once

// The most threads that work on a row. With more, a thread has too few registers on M1.
GEOMETRY kNormThreads = 512;
