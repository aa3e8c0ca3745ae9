"""Writes the list of docs/mlx.md: which checkpoints of MLX are read, and which are written.

Every name is found out: mlx-lm writes a tiny model of the architecture; its float32 logits are compared
with those of the model that is read here; then that model is written back, for mlx-lm to read.
"""

import sys
import tempfile
import textwrap
from pathlib import Path

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import torch
import transformers
from support import mlx_models

DOCUMENT = paths.REPOSITORY / "docs" / "mlx.md"
MARK = "<!-- scripts/make/make_mlx_table.py writes what follows -->\n"
TOLERANCE = 2e-5  # of the largest logit
FORMATS = {f"{bits} bit{'s' * (bits > 1)}": (bits, 32, "affine") for bits in (1, 2, 3, 4, 5, 6, 8)}
FORMATS |= {"mxfp4": (4, 32, "mxfp4"), "mxfp8": (8, 32, "mxfp8"), "nvfp4": (4, 16, "nvfp4")}


def differences(architecture: str) -> list[str]:
    """Formats whose logits differ, or that are not written back."""
    model, found = mlx_models.tiny(architecture), []
    for name, format in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours, back = mlx_models.both_ways(model, Path(folder), *format)
            results = (("read", same(theirs, ours)), ("written back", same(back, ours)))
            found += [f"{name} {way}: {result}" for way, result in results if result != "yes"]
    return found


def same(theirs: torch.Tensor, ours: torch.Tensor) -> str:
    """yes, or the error of the logits."""
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    return "yes" if error <= TOLERANCE and torch.equal(ours.argmax(-1), theirs.argmax(-1)) else f"{error:.0e}"


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    found = {}
    for architecture in sorted(mlx_models.ARCHITECTURES):
        found[architecture] = differences(architecture)
        print(architecture, *found[architecture], file=sys.stderr)
    before = DOCUMENT.read_text().partition(MARK)[0]
    DOCUMENT.write_text(before + MARK + listed(found))


def listed(found: dict[str, list[str]]) -> str:
    names = ", ".join(f"`{name}`" for name, wrong in found.items() if not wrong)
    others = (f"- `{name}`: {', '.join(wrong)}\n" for name, wrong in found.items() if wrong)
    return textwrap.fill(f"{names}.", 110, break_long_words=False) + "\n" + "".join(others)


if __name__ == "__main__":
    main()
