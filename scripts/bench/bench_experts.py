#!/usr/bin/env python
"""Measures what recipes cost a trained Mixture of Experts: docs/quality_moe.md, with a plot.

    python scripts/bench/train_moe.py texts build/moe
    python scripts/bench/train_moe.py train build/moe
    python scripts/bench/bench_experts.py measure build/moe --device cuda --llama-cpp build/bin
    python scripts/bench/bench_experts.py write

`measure` writes docs/quality_moe.json; `write` prints the rows of the page and writes the plot of that. The
texts are files of the kind that the model was trained on, Python's manual and Newton's Opticks; it read none
of them.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import paths
import torch
import transformers
from bench_quality import WINDOW, compare_texts, log_probabilities, run
from moe_gguf import write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_moe_mps
from torch_moe_mps.checkpoints.quantize.importance import Importance
from torch_moe_mps.checkpoints.quantize.sizes import bytes_a_token, total_bytes
from torch_moe_mps.commands.recipes import MIXED, arguments_of_recipe

KEPT = paths.REPOSITORY / "docs" / "quality_moe.json"
PLOT = KEPT.with_suffix(".svg")


def attention(bits: int, **more: int) -> dict[str, Any]:
    return {"overrides": {"self_attn.*": bits, **more}}


DOWN = "experts.down_proj"
# {name: arguments of from_pretrained}; the embedding has 6 bits, unless the name says otherwise.
RECIPES: dict[str, dict[str, Any]] = {
    "3 bits": {"bits": 3},
    "3 bits, attention 6": {"bits": 3, **attention(6)},
    "3 bits, attention 8": {"bits": 3, **attention(8)},
    "3 bits, attention 6, down 4": {"bits": 3, **attention(6, **{DOWN: 4})},
    "4 bits, embedding 4": {"bits": 4, "embedding_bits": 4},
    "4 bits, embedding 4, attention 6": {"bits": 4, "embedding_bits": 4, **attention(6)},
    "4 bits": {"bits": 4},
    "4 bits, attention 5": {"bits": 4, **attention(5)},
    "4 bits, attention 6": {"bits": 4, **attention(6)},
    "4 bits, attention 8": {"bits": 4, **attention(8)},
    "4 bits, query and key 6": {"bits": 4, "overrides": {"q_proj": 6, "k_proj": 6}},
    "4 bits, value and output 6": {"bits": 4, "overrides": {"v_proj": 6, "o_proj": 6}},
    "4 bits, attention 8, embedding 8": {"bits": 4, "embedding_bits": 8, **attention(8)},
    "4 bits, down 5": {"bits": 4, "overrides": {DOWN: 5}},
    "4 bits, attention 6, down 3": {"bits": 4, **attention(6, **{DOWN: 3})},
    "4 bits, attention 6, down 5": {"bits": 4, **attention(6, **{DOWN: 5})},
    "4 bits, attention 8, down 5": {"bits": 4, **attention(8, **{DOWN: 5})},
    "4 bits, attention 6, down 6": {"bits": 4, **attention(6, **{DOWN: 6})},
    "5 bits": {"bits": 5},
    "5 bits, attention 6": {"bits": 5, **attention(6)},
    "5 bits, attention 8": {"bits": 5, **attention(8)},
    "6 bits": {"bits": 6},
    "6 bits, attention 8": {"bits": 6, **attention(8)},
    "8 bits": {"bits": 8},
    "4 bits, groups of 32": {"bits": 4, "group_size": 32},
}


def superblocks(mode: str, attention_in: Any = 6, **experts: str) -> dict[str, Any]:
    """Experts in a type of ggml, some of their projections in another, and the rest in 6 bits."""
    others = {f"experts.{name}": {"mode": own} for name, own in experts.items()}
    return {"mode": mode, "embedding_bits": 6, "overrides": {"self_attn.*": attention_in, **others}}


Q6_K = {"self_attn.*": {"mode": "q6_k"}, "embed_tokens": {"mode": "q6_k"}}
SUPERBLOCKS: dict[str, dict[str, Any]] = {
    "q2_k, attention 6": superblocks("q2_k"),
    "q2_k, attention 6, down q3_k": superblocks("q2_k", down_proj="q3_k"),
    "q2_k, attention 6, down q4_k": superblocks("q2_k", down_proj="q4_k"),
    "q3_k, attention 6": superblocks("q3_k"),
    "q3_k, attention 6, down iq4_xs": superblocks("q3_k", down_proj="iq4_xs"),
    "q3_k, attention 6, down q4_k": superblocks("q3_k", down_proj="q4_k"),
    "q3_k, attention 6, down q5_k": superblocks("q3_k", down_proj="q5_k"),
    "q3_k, attention and embedding q6_k, down q4_k": {
        "mode": "q3_k",
        "overrides": {**Q6_K, "experts.down_proj": {"mode": "q4_k"}},
    },
    "iq4_xs, attention 6, down q3_k": superblocks("iq4_xs", down_proj="q3_k"),
    "iq4_xs, attention 6": superblocks("iq4_xs"),
    "iq4_xs, attention 6, down q5_k": superblocks("iq4_xs", down_proj="q5_k"),
    "q4_k everywhere": {"mode": "q4_k", "embedding_bits": "same"},
    "iq4_xs everywhere": {"mode": "iq4_xs", "embedding_bits": "same"},
    "q4_k, embedding 6": {"mode": "q4_k", "embedding_bits": 6},
    "q4_k, attention 6": superblocks("q4_k"),
    "q4_k, attention and embedding q6_k": {
        "mode": "q4_k",
        "overrides": Q6_K,
    },
    "q4_k, attention 8": superblocks("q4_k", 8),
    "q4_k, attention 6, down q5_k": superblocks("q4_k", down_proj="q5_k"),
    "q4_k, attention 8, down q5_k": superblocks("q4_k", 8, down_proj="q5_k"),
    "q5_k, attention 6": superblocks("q5_k"),
    "q5_k, attention 8": superblocks("q5_k", 8),
    "q6_k, attention 8": superblocks("q6_k", 8),
}
MLX, EACH, ALL = "MLX's rule", "importance", "importance, one for all experts"
ALIKE = "no importance"
# Recipes that are measured in the third way, too.
ONE_FOR_ALL = ("4 bits", "4 bits, attention 6", "3 bits, attention 6")


# {name: (type, {tensors: their type})} of llama-quantize; the embedding gets what it chooses, Q6_K.
ATTENTION = "attn_(q|k|v|output)"
LLAMA_CPP: dict[str, tuple[str, dict[str, str]]] = {
    "Q3_K_M": ("Q3_K_M", {}),
    "Q3_K_M, attention Q6_K": ("Q3_K_M", {ATTENTION: "q6_k"}),
    "IQ4_XS": ("IQ4_XS", {}),
    "IQ4_XS, attention Q6_K": ("IQ4_XS", {ATTENTION: "q6_k"}),
    "Q4_K_S": ("Q4_K_S", {}),
    "Q4_K_M": ("Q4_K_M", {}),
    "Q4_K_S, attention Q6_K": ("Q4_K_S", {ATTENTION: "q6_k"}),
    "Q4_K_S, attention Q8_0, down Q5_K": ("Q4_K_S", {ATTENTION: "q8_0", "ffn_down_exps": "q5_k"}),
    "Q5_K_M": ("Q5_K_M", {}),
    "Q6_K": ("Q6_K", {}),
}


def read(folder: Path, count: int, calibration: int) -> tuple[Tensor, list[Tensor]]:
    """The tokens of importance, and those of each text."""
    held = torch.from_numpy(np.fromfile(folder / "held.bin", dtype=np.uint16).astype(np.int64))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    manual = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    prose = files("tvm_ffi").joinpath("3rdparty/libbacktrace/Isaac.Newton-Opticks.txt").read_text()
    others = [
        tokenizer(text[len(text) // 2 :][: 8 * count], return_tensors="pt").input_ids[0][:count]
        for text in (manual, prose)
    ]
    return held[count : count + calibration], [held[:count], *others]


def for_all_experts(importance: Importance) -> Importance:
    """The same where all experts of a layer have the mean of theirs."""
    means = {
        name: mean.mean(0, keepdim=True).expand_as(mean).contiguous() if mean.dim() > 1 else mean
        for name, mean in importance.means.items()
    }
    return Importance(means, importance.tokens, importance.model, importance.text)


def ways(dense: Any, importance: Importance) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, way and arguments of from_pretrained of every row."""
    alike = for_all_experts(importance)
    mixed = {f"{name} of mlx-lm": arguments_of_recipe(name, dense) for name in MIXED}
    for name, recipe in (RECIPES | mixed).items():
        yield name, MLX, recipe
        yield name, EACH, recipe | {"importance": importance}
        if name in ONE_FOR_ALL:
            yield name, ALL, recipe | {"importance": alike}
    fit = (
        dense.config.hidden_size % 256 == dense.config.moe_intermediate_size % 256 == 0
    )  # not of --size small
    for name, recipe in SUPERBLOCKS.items() if fit else ():
        yield name, ALIKE, recipe
        yield name, EACH, recipe | {"importance": importance}


class Measured:
    """Rows that a folder keeps, so that a second run goes on."""

    def __init__(self, file: Path):
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, name: str, way: str) -> bool:
        return any((row["recipe"], row["way"]) == (name, way) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)


class Files:
    """Files that llama.cpp's tools make of a model, with importance of the same tokens."""

    def __init__(self, folder: Path, binaries: Path, importance_ids: Tensor):
        self.folder, self.binaries = folder / "llama.cpp", binaries
        self.folder.mkdir(exist_ok=True)
        self.source, self.matrix = self.folder / "source.gguf", self.folder / "imatrix.gguf"
        if not self.matrix.exists():
            write_gguf(folder / "model", self.source)
            text = self.folder / "text"
            text.write_text(AutoTokenizer.from_pretrained(folder / "tokenizer").decode(importance_ids))
            run(binaries / "llama-imatrix", "-m", self.source, "-f", text, "-o", self.matrix, "-c", WINDOW)

    def write(self, kind: str, others: dict[str, str]) -> Path:
        """The file of a type; `others` have types of their own, by names of tensors."""
        file = self.folder / "quantised.gguf"
        options = [part for name, own in others.items() for part in ("--tensor-type", f"{name}={own}")]
        run(self.binaries / "llama-quantize", "--imatrix", self.matrix, *options, self.source, file, kind)
        return file


def measure(
    folder: Path, device: str, count: int, calibration: int, binaries: Path | None, only: list[str]
) -> dict[str, Any]:
    """`only`: parts of names; recipes without any of them are left out."""
    model = folder / "model"
    importance_ids, texts = read(folder, count, calibration)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        expected = [log_probabilities(dense, ids.to(device)) for ids in texts]
    started = time.monotonic()
    importance = torch_moe_mps.collect_importance(dense, importance_ids, progress=False)
    seconds = time.monotonic() - started
    measured = Measured(folder / "rows.jsonl")

    def is_asked_for(name: str) -> bool:
        return not only or any(part in name for part in only)

    def add(name: str, way: str, own: Any) -> None:
        sizes = total_bytes(own), bytes_a_token(own)
        torch.nn.Module.float(own)  # transformers refuses to cast what is quantised
        divergences = [
            compare_texts(own, ids.to(device), logs)[1:] for ids, logs in zip(texts, expected, strict=True)
        ]
        measured.add({"recipe": name, "way": way, "bytes": sizes[0], "token": sizes[1], "texts": divergences})

    into = {"dtype": torch.float16, "device_map": device, "check": False}
    for name, way, arguments in ways(dense, importance):
        if not measured.has(name, way) and is_asked_for(name):
            recipe = {"linear_bits": "same"} | arguments
            add(name, way, torch_moe_mps.from_pretrained(str(model), **recipe, **into))
    if binaries is not None:
        made = Files(folder, binaries, importance_ids)
        for kind, (base, others) in LLAMA_CPP.items():
            if not measured.has(f"llama.cpp {kind}", EACH) and is_asked_for(f"llama.cpp {kind}"):
                file = made.write(base, others)
                add(f"llama.cpp {kind}", EACH, torch_moe_mps.from_pretrained(str(file), **into))
    return {
        "tokens": count,
        "calibration": calibration,
        "losses": [loss(ids, logs) for ids, logs in zip(texts, expected, strict=True)],
        "importance_seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a processor",
        "dense": {"bytes": total_bytes(dense) // 2, "token": bytes_a_token(dense) // 2},
        "training": json.loads((model / "training.json").read_text()),
        "text": json.loads((folder / "texts.json").read_text()),
        "rows": measured.rows,
    }


def loss(ids: Tensor, logs: list[Tensor]) -> float:
    """The dense model's own, in nats a token."""
    windows = zip(ids.split(WINDOW), logs, strict=True)
    own = torch.cat([log.gather(1, part[1:, None].to(log.device)) for part, log in windows])
    return round(-own.mean().item(), 4)


def table(kept: dict[str, Any]) -> str:
    """Rows of the recipes that the plot names, and of two by MLX's rule."""
    dense = kept["dense"]
    lines = [f"| dense, bfloat16 | {dense['bytes'] / 1e6:.1f} | {dense['token'] / 1e6:.1f} |" + " |" * 4]
    for row in kept["rows"]:
        name, way = row["recipe"], row["way"]
        if (way == EACH and name in NAMED) or (way == MLX and name in ("4 bits", "4 bits, attention 6")):
            (held, _), (manual, alike), (prose, _) = row["texts"]
            sizes = f"{row['bytes'] / 1e6:.1f} | {row['token'] / 1e6:.1f}"
            shown = name if way == EACH else f"{name}: {way}"
            losses = f"{held:.4f} | {manual:.4f} | {100 * alike:.1f} % | {prose:.4f}"
            lines.append(f"| {shown} | {sizes} | {losses} |")
    return "\n".join(lines) + "\n"


WIDTH, HEIGHT, EDGE = 520, 420, 50
# Recipes with a row on the page and a name in the plot; the others are points.
NAMED = ("3 bits", "4 bits", "5 bits", "6 bits", "4 bits, attention 6", "3 bits, attention 6, down 4")
NAMED += ("4 bits, attention 6, down 5", "mixed_3_6 of mlx-lm", "mixed_4_6 of mlx-lm")
NAMED += ("q3_k, attention 6, down iq4_xs", "iq4_xs everywhere", "q4_k, attention 6", "q5_k, attention 6")
NAMED += (
    "iq4_xs, attention 6, down q5_k",
    "llama.cpp IQ4_XS",
    "llama.cpp Q4_K_M",
    "llama.cpp Q4_K_S, attention Q6_K",
    "llama.cpp Q5_K_M",
)
COLOURS = {"mlx-lm": "#c60", "llama.cpp": "#383"}


def plot(kept: dict[str, Any]) -> str:
    """Two diagrams beside each other: the divergence on the manual, by bytes and by bytes of a token."""
    rows = [row for row in kept["rows"] if row["recipe"] != "8 bits" and row["way"] in (MLX, EACH)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" font-size="10" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, (key, label) in enumerate((("bytes", "MB"), ("token", "MB a token"))):
        parts += _diagram(rows, key, label, place * WIDTH)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _diagram(rows: list[dict[str, Any]], key: str, label: str, left: int) -> Iterator[str]:
    values = [row[key] / 1e6 for row in rows]
    low, high = min(values), max(values)
    logs = [math.log10(row["texts"][1][0]) for row in rows]
    bottom, top = min(logs), max(logs)

    def at(value: float, log: float) -> tuple[float, float]:
        x = left + EDGE + (value - low) / (high - low) * (WIDTH - 3 * EDGE)
        return x, EDGE + (top - log) / (top - bottom) * (HEIGHT - 2 * EDGE)

    for number in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
        _, y = at(low, math.log10(number))
        yield f'<path d="M{left + EDGE} {y:.1f}H{left + WIDTH - EDGE}" stroke="#ddd"/>'
        yield f'<text x="{left + EDGE - 5}" y="{y + 3:.1f}" text-anchor="end">{number}</text>'
    for part in range(5):
        x, _ = at(low + part * (high - low) / 4, bottom)
        number = f"{low + part * (high - low) / 4:.0f}"
        yield f'<text x="{x:.1f}" y="{HEIGHT - 25}" text-anchor="middle">{number}</text>'
    title = f"KL on Python's manual, by {label} (hollow: MLX's rule; filled: importance)"
    yield f'<text x="{left + EDGE}" y="20" font-size="12">{title}</text>'
    for row, value, log in zip(rows, values, logs, strict=True):
        x, y = at(value, log)
        colour = next((other for name, other in COLOURS.items() if name in row["recipe"]), "#06c")
        fill = colour if row["way"] == EACH else "none"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" stroke="{colour}" fill="{fill}"/>'
        if row["way"] == EACH and row["recipe"] in NAMED:
            yield f'<text x="{x + 6:.1f}" y="{y + 3:.1f}">{row["recipe"]}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    own = parts.add_parser("measure", help="measures all recipes")
    own.add_argument("folder", type=Path, help="of scripts/bench/train_moe.py; rows are kept in it")
    own.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    own.add_argument("--tokens", type=int, default=1024, help="of each text (1024)")
    own.add_argument("--calibration", type=int, default=16384, help="tokens of importance (16384)")
    own.add_argument("--out", type=Path, default=KEPT, help=f"file to write ({KEPT.name} in docs)")
    own.add_argument(
        "--llama-cpp", type=Path, help="folder of llama-quantize and llama-imatrix: its files, too"
    )
    only = "of a recipe's name: no others; repeatable"
    own.add_argument("--only", action="append", default=[], metavar="PART", help=only)
    parts.add_parser("write", help="prints the rows of the page and writes the plot")
    options = parser.parse_args()
    if options.part == "write":
        kept = json.loads(KEPT.read_text())
        print(table(kept), end="")
        PLOT.write_text(plot(kept))
        return
    transformers.utils.logging.disable_progress_bar()
    chosen = options.folder, options.device, options.tokens, options.calibration, options.llama_cpp
    options.out.write_text(json.dumps(measure(*chosen, options.only), indent=1))


if __name__ == "__main__":
    main()
