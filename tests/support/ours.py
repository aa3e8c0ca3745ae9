"""Which files are the package's: those of its folder, whatever the folders above it are called.

A clone has the name that git gives it, which is the package's, and the environment with all other packages
lies in the clone.
"""

import importlib.util
import os

FOLDER = os.path.join(os.path.dirname(importlib.util.find_spec("torch_moe_mps").origin), "")


def is_file_of_ours(file: str) -> bool:
    return file.startswith(FOLDER)
