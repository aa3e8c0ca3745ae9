// Formulas of elements
#pragma once

GEOMETRY kPointwiseThreads = 64;
