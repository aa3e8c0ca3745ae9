"""What one architecture alone needs, in a folder of its own, which nothing else knows.

A folder adds its parts to the tables of the rooms below when it is imported. Without it, models of its
architecture run their own code, and the operators that others have, too.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

GGUF: dict[str, str] = {}  # {architecture of a GGUF file: the module with its `config` and `conversions`}
# {form of answers in xgrammar: the module with the MARKS of its chat template, a TEMPLATE and a `grammar`}
ANSWERS: dict[str, str] = {}
# {model type: the keys that transformers 5 writes into its config, and what makes of them those that mlx-lm
# reads in their place}
MLX_KEYS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]]] = {}
# {model type: how mlx-lm's names of its parameters differ, as checkpoints.mlx.names.Architecture has it}
MLX_NAMES: dict[str, dict[str, Any]] = {}

for _folder in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_folder.name}")
