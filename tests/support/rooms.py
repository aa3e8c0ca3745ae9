"""The rooms of the package, and who imports whom."""

import functools

from . import dependents
from .dependents import PACKAGE, REPOSITORY, name_of

# Parts of the package from the lowest floor to the highest: a part imports those below it.
FLOORS = (
    "_versions",
    "_text",
    "_progress",
    "_weight_formats",
    "_install",
    "_hub",
    "_svg",
    "_extension",
    "_faults",
    "macs",
    "ops",
    "selfcheck",
    "quantization",
    "transformers.upstream",
    "transformers.basics",
    "transformers.graphs",
    "transformers.caches",
    "transformers.trials",
    "transformers.modules",
    "transformers.attention",
    "transformers.families",
    "transformers.capture",
    "transformers.checkpoints",
    "transformers.mtp",
    "transformers",
    "serving",
    "pipeline",
    "training",
    "commands",
    "_registration",
    "__main__",
)


@functools.cache
def graph() -> dict[str, set[str]]:
    """{module: the modules of the package that it imports}."""
    return {
        name_of(path, REPOSITORY): {name_of(o, REPOSITORY) for o in others if o.is_relative_to(PACKAGE)}
        for path, others in dependents.graph().items()
        if path.is_relative_to(PACKAGE)
    }


def floor(name: str) -> int:
    """The floor of a module: that of the longest name in FLOORS that it belongs to."""
    inner = name.removeprefix("torch_moe_mps.")
    matching = [floor for floor in FLOORS if inner == floor or inner.startswith(f"{floor}.")]
    assert matching, f"{name} is on no floor"
    return FLOORS.index(max(matching, key=len))
