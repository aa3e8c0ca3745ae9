"""The script `torch-moe-mps`.

It is no part of the package, whose import takes the seconds of torch's: a wrong option is refused before.
"""


def run() -> int:
    """Runs the command of this process. Returns: its exit code."""
    from torch_moe_mps.__main__ import run

    return run()
