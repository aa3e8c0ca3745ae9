"""What one architecture alone needs, in a folder of its own, which nothing else knows.

A folder adds its parts to the tables of the rooms below when it is imported. Without it, models of its
architecture run their own code, and the operators that others have, too.
"""

import importlib
import pkgutil

GGUF: dict[str, str] = {}  # {architecture of a GGUF file: the module with its `config` and `conversions`}

for _folder in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_folder.name}")
