"""`python -m torch_moe_mps`."""

import sys

from .commands import run

sys.exit(run())
