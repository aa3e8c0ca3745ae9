"""Builds every kernel of the package on this machine's GPU, and compares every operator with its reference.

Prints the machine and its versions, then a line a kernel (the threads that a threadgroup may have after
Apple's compiler has chosen the registers, the threadgroup memory that the kernel declares), then a line an
operator and dtype. Ends with 1 if anything failed.
"""

import argparse
import platform
import subprocess
import sys

import torch
from support.samples import copies, packet, sample_arguments

import torch_moe_mps
from torch_moe_mps.ops import OPERATORS

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of the largest value


def machine() -> str:
    chip = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
    system = platform.mac_ver()[0] or platform.platform()
    return (
        f"{chip.stdout.strip() or platform.machine()}, macOS {system}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, torch_moe_mps {torch_moe_mps.__version__}"
    )


def libraries(every_dtype: bool) -> list[str]:
    """The Metal libraries of the package: for bfloat16, the dtype of most models, or for every dtype."""
    names = torch.ops.moe_mps._libraries()
    return [name for name in names if every_dtype or not name.endswith(("f32", "_f16"))]


def check_kernels(names: list[str]) -> int:
    """Prints what became of each kernel; the number of libraries that do not build."""
    failures = 0
    for library in names:
        try:
            for line in torch.ops.moe_mps._pipelines(library):
                name, threads, memory = line.split()
                print(f"{name:44} {threads:>5} threads {memory:>6} bytes")
        except RuntimeError as error:
            failures += 1
            print(f"{library:44} FAILED: {error}")
    return failures


def outputs(name: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """What an operator returns and what it writes in place, on the CPU."""
    arguments = copies(sample_arguments(device, dtype)[name])
    result = packet(name)(**arguments)
    results = [*result] if isinstance(result, tuple) else [result]
    return [tensor.cpu() for tensor in (*results, arguments.get("residual_")) if tensor is not None]


def compare(name: str, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    for actual, expected in zip(outputs(name, "mps", dtype), outputs(name, "cpu", dtype), strict=True):
        largest = expected.double().abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * largest)


def check_operators() -> int:
    """Prints how each operator compares with the CPU; the number of those that differ or fail."""
    failures = 0
    for name in OPERATORS:
        for dtype in TOLERANCE:
            label = f"{name:36} {str(dtype).removeprefix('torch.'):10}"
            try:
                compare(name, dtype)
                print(label, "ok")
            except (AssertionError, RuntimeError) as error:
                failures += 1
                print(label, f"FAILED: {error}")
    return failures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every-dtype", action="store_true", help="kernels for float32 and float16 too")
    options = parser.parse_args(arguments)
    print(machine())
    failures = check_kernels(libraries(options.every_dtype)) + check_operators()
    print(f"{failures} failed" if failures else "all built, all equal")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
