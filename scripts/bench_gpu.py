#!/usr/bin/env python3
"""Times the package's kernels on an NVIDIA GPU: python scripts/bench_gpu.py --help."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "")]

from simulator.nvidia.main import main  # noqa: E402

if __name__ == "__main__":
    os.environ.setdefault("SIMULATED_GPU", "Apple M3 Ultra")  # plans for many cores, as such a GPU has
    sys.exit(main(sys.argv[1:]))
