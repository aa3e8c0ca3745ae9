"""Says whether the installed extension loads into the installed torch and has a kernel for every operator.

Libraries that a wheel brings compiled must be of the sources that it brings.
"""

import argparse
import warnings

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()

import torch

with warnings.catch_warnings():
    warnings.simplefilter("error")  # the package warns where the extension does not load
    import torch_moe_mps
    from torch_moe_mps._extension import SHADERS
    from torch_moe_mps.ops import OPERATORS

without = [
    name
    for name in OPERATORS
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_mps::{name}", "MPS")
]
if without:
    raise SystemExit(f"no Metal kernel is registered for {', '.join(without)}")
compiled = {path.name for path in SHADERS.glob("compiled/*.metallib")}
known = {torch.ops.moe_mps._library_file(name) for name in torch.ops.moe_mps._libraries()}
if compiled - known:
    raise SystemExit(f"compiled of other sources: {', '.join(sorted(compiled - known))}")
print(
    f"torch_moe_mps {torch_moe_mps.__version__}: {len(OPERATORS)} operators have a Metal kernel in torch "
    f"{torch.__version__}, {len(compiled)} of {len(known)} libraries are compiled"
)
