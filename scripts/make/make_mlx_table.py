"""Writes the table of docs/mlx.md: which checkpoints of MLX are read, and which are written.

Every cell is found out: mlx-lm writes a tiny model of the architecture; its float32 logits are compared
with those of the model that is read here; then that model is written back, for mlx-lm to read.
"""

import sys
import tempfile
from pathlib import Path

import paths
import torch
import transformers
from support import mlx_models

from torch_moe_mps.transformers.checkpoints.mlx.architectures import ARCHITECTURES

DOCUMENT = paths.REPOSITORY / "docs" / "mlx.md"
MARK = "<!-- scripts/make/make_mlx_table.py writes what follows -->\n"
TOLERANCE = 2e-5  # of the largest logit
FORMATS = {f"{bits} bit{'s' * (bits > 1)}": (bits, 32, "affine") for bits in (1, 2, 3, 4, 5, 6, 8)}
FORMATS |= {"mxfp4": (4, 32, "mxfp4"), "mxfp8": (8, 32, "mxfp8"), "nvfp4": (4, 16, "nvfp4")}


def head() -> str:
    names = ["architecture", "experts in MLX", *FORMATS, "written back"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"


def row(architecture: str) -> str:
    model = mlx_models.tiny(architecture)
    cells = []
    for format in FORMATS.values():
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours, back = mlx_models.both_ways(model, Path(folder), *format)
            cells.append((same(theirs, ours), same(back, ours)))
    back = "yes" if all(result == "yes" for _, result in cells) else "no"
    experts = ARCHITECTURES[type(model.config.get_text_config()).model_type].experts
    return f"| `{architecture}` | {experts} | {' | '.join(read for read, _ in cells)} | {back} |\n"


def same(theirs: torch.Tensor, ours: torch.Tensor) -> str:
    """yes, or the error of the logits."""
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    return "yes" if error <= TOLERANCE and torch.equal(ours.argmax(-1), theirs.argmax(-1)) else f"{error:.0e}"


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows = []
    for architecture in sorted(mlx_models.ARCHITECTURES):
        rows.append(row(architecture))
        print(rows[-1], end="", file=sys.stderr)
    before = DOCUMENT.read_text().partition(MARK)[0]
    DOCUMENT.write_text(before + MARK + head() + "".join(rows))


if __name__ == "__main__":
    main()
