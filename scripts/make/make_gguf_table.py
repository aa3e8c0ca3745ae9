"""Writes the tables of docs/gguf.md: architectures, and ggml's types with the operators that run them.

An architecture that the package `gguf` gives experts is read, or has a reason here. Every cell of the types
is found out: random blocks are read as the loader reads them, and operators run them; the oracle is the
package `gguf`, or for what it has no values of, the definition.
"""

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS
from support.gguf_blocks import HALVES, OTHERS, SIZES, random_blocks, values_of
from torch import Tensor

from torch_moe_mps.checkpoints.gguf.architectures import ARCHITECTURES
from torch_moe_mps.checkpoints.gguf.file import read_architectures
from torch_moe_mps.ops.families import linear, quantized
from torch_moe_mps.quantization import QuantizedWeight
from torch_moe_mps.quantization.gguf import format_of_blocks, from_blocks

DOCUMENT = paths.REPOSITORY / "docs" / "gguf.md"
MARK = "<!-- scripts/make/make_gguf_table.py writes what follows -->\n"
ARCHITECTURES_MARK = "<!-- scripts/make/make_gguf_table.py writes this table -->\n"
END_MARK = "<!-- end of the architectures -->\n"
NO_CLASS = "transformers has no class"
LEFT_OUT = {
    **dict.fromkeys(
        ("arctic", "bailingmoe", "bailingmoe2", "deci", "deepseek", "grok", "grovemoe"), NO_CLASS
    ),
    **dict.fromkeys(("llada-moe", "minicpm", "rnd1", "smallthinker"), NO_CLASS),
    "clip": "a vision tower, without a language model",
    "deepseek2-ocr": "reads images alone, whose tower is in another file",
    "llama-embed": "an embedding model",
    "nomic-bert-moe": "an encoder",
}
HEAD = ("type", "bits", "read otherwise")
TOLERANCE = 2e-5  # of the largest output
EXPERTS, ROWS, COLUMNS = 2, 16, 512
DENSE = ("f32", "f16", "bf16")


def row(name: str) -> list[str]:
    values_of_block, size = SIZES[name]
    bits, kind = f"{8 * size / values_of_block:.4g}", name.upper()
    known = name in {**HALVES, **OTHERS}
    blocks = random_blocks(name, (EXPERTS, ROWS, COLUMNS)) if known else np.zeros((2, 2, size), np.uint8)
    try:
        found = values_of(blocks.reshape(-1, blocks.shape[-1]), name)
    except NotImplementedError:
        return [kind, bits, "refused"]
    values, format = torch.from_numpy(found), format_of_blocks(name)
    if format is None:
        return [kind, bits, "dequantised"]
    weight = from_blocks(torch.from_numpy(blocks), name)
    exact = torch.equal(weight.values(slice(None)).view(values.shape), values)
    here = f"{8 * weight.nbytes / values.numel():.4g}"
    remarks = [] if (str(weight.format), here) == (name, bits) else [f"as `{weight.format}`, {here} bits"]
    remarks += [] if exact else ["values differ"]
    remarks += differences(weight, values.view(EXPERTS, ROWS, -1))
    return [kind, bits, ", ".join(remarks)]


def differences(weight: QuantizedWeight, values: Tensor) -> list[str]:
    """Errors of a linear layer, experts and an embedding above the tolerance."""
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [1, 0], [1, 1]])
    first = [None if tensor is None else tensor[0] for tensor in weight]
    name = weight.format.name
    of_experts = torch.einsum("tkrc,tc->tkr", values[ids].double(), x.double())
    found = (
        (linear.linear_quantized(x, *first, format=name), x.double() @ values[0].double().T),
        (quantized.expert_qmm(x, ids, *weight, format=name), of_experts),
        (linear.embedding_quantized(ids, *first, format=name, dtype=torch.float32), values[0][ids]),
    )
    names = "linear layers", "experts", "embeddings"
    errors = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in found]
    return [f"{name}: {error:.0e}" for name, error in zip(names, errors, strict=True) if error > TOLERANCE]


def table() -> str:
    kinds = [kind for kind in SIZES if kind not in DENSE and kind[0] not in "if"]
    kinds += [kind for kind in SIZES if kind.startswith("iq")]
    head, *rows = (f"| {' | '.join(line)} |\n" for line in (HEAD, *map(row, kinds)))
    return "".join((head, "|---" * len(HEAD) + "|\n", *rows))


def architectures() -> str:
    """Rows of what is read, and of what has experts and is not.

    Raises: KeyError for an architecture with experts that is neither read nor has a reason.
    """
    lines = ["| architecture | read by | not read because |\n", "|---|---|---|\n"]
    read = read_architectures()
    experts = {
        MODEL_ARCH_NAMES[kind]
        for kind, tensors in MODEL_TENSORS.items()
        if any(tensor.name.endswith("_EXP") for tensor in tensors)
    }
    for name in sorted({*read, *experts}):
        if name in read:
            row = ARCHITECTURES.get(name)
            by = "transformers" if row is None else "a row"
            if row is not None and row.needs_experts:
                by = "transformers; with experts, a row"
            lines.append(f"| {name} | {by} |  |\n")
        else:
            lines.append(f"| {name} |  | {LEFT_OUT[name]} |\n")
    return "".join(lines)


def main() -> None:
    before, _, rest = DOCUMENT.read_text().partition(ARCHITECTURES_MARK)
    between = rest.partition(END_MARK)[2].partition(MARK)[0]
    written = f"{ARCHITECTURES_MARK}{architectures()}{END_MARK}"
    DOCUMENT.write_text(f"{before}{written}{between}{MARK}{table()}")


if __name__ == "__main__":
    main()
