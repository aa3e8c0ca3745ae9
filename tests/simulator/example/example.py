"""Builds and runs a Metal extension without a Mac, and finds what is wrong with changed kernels."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # the folder that simulator/ lies in

import simulator  # noqa: E402

simulator.install()  # before anything asks torch for MPS

import torch  # noqa: E402
from simulator.language import strict  # noqa: E402

extension = simulator.load("normalise", [HERE / "normalise.mm"])
source = (HERE / "normalise.metal").read_text()
x = torch.rand(5, 100)


def right(text: str) -> str:
    try:
        found = extension.normalise(x.to("mps"), text).cpu()
    except simulator.SimulatorError as error:
        return str(error)
    return "right" if torch.allclose(found, x / x.sum(1, keepdim=True)) else "wrong"


for seed in range(4):
    simulator.set_schedule(seed)
    print(f"schedule {seed}: {right(source)}")
barrier = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
print("without its barrier:", right(source.replace(barrier, "")))
simulator.reset()
print("with a row too many:", right(source.replace("row * width + i] = in", "(row + 1) * width + i] = in")))
print("the strict check:", strict.check_file(HERE / "normalise.metal") or "ok")
print(
    "the strict check of a double:", *strict.check(source.replace("const float sum", "const double sum"))[:1]
)
