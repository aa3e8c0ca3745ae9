"""Pipeline parallelism over torch.distributed processes that hold consecutive layers.

    torch_moe_mps.pipeline.from_pretrained(name, distributed_config=DistributedConfig(pp_size=2), bits=4)

    loop      finds how a model runs its layers: whether it can be cut, and what has to be handed on
    stages    stand-ins for what other processes have, while the model is loaded and when it is called
    shares    how many layers each process has
    peers     the processes: messages, time limits, and the errors of a failed process
    exchange  hidden states of a call, from each stage to the next
    running   calls of the model: equal inputs in all processes, and logits for all
    executor  steps of the engine, which runs in the first process
    orders    what the first process tells the others to do to their caches
    following a handler for each order

Every process calls the model with the same inputs and runs its whole `forward`. Stand-ins for other
processes' layers return hidden states unchanged; the last one before a process's own layers returns the
neighbour's.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import from_pretrained

__all__ = ["from_pretrained"]


def __getattr__(name: str) -> Any:
    """Imported when first used: it needs torch and transformers."""
    if name != "from_pretrained":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .loading import from_pretrained

    return from_pretrained
