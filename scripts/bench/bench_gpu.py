#!/usr/bin/env python3
"""Times the package's kernels on an NVIDIA GPU: python scripts/bench/bench_gpu.py --help."""

import os
import sys

import paths  # noqa: F401  (for measured)
from measured.cuda.main import main

if __name__ == "__main__":
    os.environ.setdefault("SIMULATED_CORES", "80")  # plans for many cores, as an M3 Ultra has
    sys.exit(main(sys.argv[1:]))
