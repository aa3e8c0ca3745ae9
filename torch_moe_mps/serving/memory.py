"""How many answers are generated together, and in how much memory."""

import torch
from transformers import PreTrainedModel

from ..macs import machine_memory

# Answers at once: before the M5, matmuls of 16 rows take nearly twice as long as those of 8, and on all GPUs
# experts do, of which each has a few of the rows.
MOST_ROWS = 8
_OF_THE_MACHINE = 0.75  # part of its memory that a model with all that it computes may take on a CPU


def free_memory(model: PreTrainedModel) -> int:
    """Bytes that answers and kept prompts may take beside a model."""
    if model.device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return max(0, int(_OF_THE_MACHINE * machine_memory()) - weights)
