"""The operators, a file for each family, with three functions for each operator:

    draw_<operator>(d)          valid arguments, from support.any_arguments.Draws
    expected_<operator>(a)      results in float64, as support.oracles_operators.Expected, for arguments a
    invalid_<operator>(zeros)   wrong() of arguments that are refused beyond the declaration; not every
                                operator has it. zeros(*shape, dtype=torch.float32) makes tensors.

A machine that replays recordings imports them too: nothing here needs pytest, hypothesis or gguf.
"""

import functools
import importlib
from types import ModuleType

from torch_moe_mps.ops._samples import FAMILY_OF

FLOATS = "float32 or float16 or bfloat16"


@functools.cache
def family(name: str) -> ModuleType:
    """The file of an operator."""
    return importlib.import_module(f"support.ops.{FAMILY_OF[name]}")


def wrong(message: str, **arguments) -> tuple[str, dict]:
    """The message about wrong arguments, and these.

    The text may be only what the first of them must be, and may leave out what it got: one of them.
    """
    return (message if " must be " in message else f"{next(iter(arguments))} must be {message}"), arguments
