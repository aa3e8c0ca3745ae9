"""A cost model of Apple GPUs: what Metal kernels would execute there, without a Mac.

    measure(call)              one Measurement for each dispatch of the operators that `call` calls on "mps"
    clocked(gpu, factor)       the GPU's clock goes as the model predicts
    registers(library, name)   the registers that a kernel needs
    GPUS                       the GPUs that it knows

The kernels are those that host code dispatches: nothing about launches is written down here.
Their translated source is lowered to LLVM IR without a target. Each instruction becomes those that an Apple
GPU would execute (lower.py) at published costs (facts.py); the executor runs the same IR on the real buffers,
and counts its blocks and accesses (count.py).
"""

from .count import Limit
from .facts import GPUS, table, threads_for
from .model import Measurement, Traffic, Work
from .recorder import Recorder, clocked, measure, registers

__all__ = [
    "GPUS",
    "Limit",
    "Measurement",
    "Recorder",
    "Traffic",
    "Work",
    "clocked",
    "measure",
    "registers",
    "table",
    "threads_for",
]
