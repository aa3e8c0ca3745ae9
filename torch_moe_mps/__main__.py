"""`python -m torch_moe_mps`, and the script `torch-moe-mps`."""

import sys

from ._interrupts import ending_at_once


def run() -> int:
    """Runs the command of this process. Returns: its exit code."""
    with ending_at_once():
        from .commands import run
    return run()


if __name__ == "__main__":
    sys.exit(run())
