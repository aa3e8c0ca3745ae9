"""Prints docs/others.md's table: checkpoints in the schemes of other libraries, and what becomes of them.

A tiny Qwen3-MoE is written in each scheme, by compressed-tensors itself where it has the scheme, else in
the layout of the library (tests/support/other_libraries.py), and loaded. Errors are
against the library's own dequantised arithmetic, relative to the largest value; those of logits are of a tiny
Qwen3.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import paths
import torch
from safetensors.torch import load_file
from support import other_libraries
from support.models import output, prompt

import torch_moe_mps
from torch_moe_mps.transformers.checkpoints.quantize.weights import quantized_names
from torch_moe_mps.transformers.modules.linears import formats_in

sys.path.append(str(paths.REPOSITORY / "tests" / "transformers"))
import test_other_quantizers as others

NAMES = {
    "awq": "AWQ, gemm", "gptq": "GPTQ, symmetric", "gptq asymmetric": "GPTQ, 8 bits, asymmetric",
    "nvfp4 exact": "NVFP4, factor 1/8", "fp8 of blocks": "FP8, DeepSeek",
    "fp8 of blocks by powers": "FP8, DeepSeek, scales by powers of two",
}  # fmt: skip
CODES = ("weight_packed", "qweight", "weight_scale", "weight_scale_inv")
UNREAD = ("g_idx", "weight_shape", ".bias")


def measure(writer: Any, architecture: str = "qwen3_moe", small: str = "qwen3") -> list[str]:
    """Formats, bits a weight in the file and in memory, errors of weights and of logits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = other_libraries.write(folder, writer, architecture)
        stored = load_file(folder / "model.safetensors")
        modules = {key.rpartition(".")[0] for key in stored if key.endswith(CODES)}
        inside = [key for key in stored if key.rpartition(".")[0] in modules and not key.endswith(UNREAD)]
        file, memory, weights, formats = sum(stored[key].nbytes for key in inside), 0, 0, set()
        model = torch_moe_mps.from_pretrained(folder, dtype=torch.bfloat16)
        for module in model.modules():
            for parameter, form in formats_in(module).items():
                tensors = [getattr(module, part, None) for part in quantized_names(parameter)]
                memory += sum(tensor.nbytes for tensor in tensors if tensor is not None)
                weights += tensors[0].nbytes * 8 // form.bits
                formats.add(str(form))
        model = torch_moe_mps.from_pretrained(folder, dtype=torch.float32)
        errors = [_error(*pair) for pair in other_libraries.weights(model, expected)]
    with tempfile.TemporaryDirectory() as name:  # without routers, which a small difference may turn
        expected = other_libraries.write(Path(name), writer, small)
        model = torch_moe_mps.from_pretrained(name, dtype=torch.float32)
        logits = _error(output(model, prompt()), output(expected, prompt()))
    shown = [f"{error:.2%}" if error > 1e-5 else "0" for error in (max(errors), logits)]
    return [", ".join(sorted(formats)), f"{8 * file / weights:.2f}", f"{8 * memory / weights:.2f}", *shown]


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    rows = [["scheme", "becomes", "bits, file", "bits, memory", "error of weights", "of logits"], ["---"] * 6]
    for scheme, (group, *_) in others.SCHEMES.items():
        rows.append([f"compressed-tensors {scheme}", *measure(other_libraries.Library(scheme, group))])
    scheme = other_libraries.Library("W4A16", 32)
    rows.append(["gpt-oss, compressed-tensors W4A16", *measure(scheme, "gpt_oss", "gpt_oss")])
    for case, title in NAMES.items():
        rows.append([title, *measure(others.CASES[case][0])])
    sys.stdout.writelines(f"| {' | '.join(row)} |\n" for row in rows)
