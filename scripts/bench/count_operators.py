#!/usr/bin/env python
"""Operators of a layer for one new token, with transformers' experts implementations and captured in 4 bits.

Of transformers: operators of aten that are no views, for experts "eager", "grouped_mm" (the default) and
"batched_mm" (to which generate() changes the default on a GPU), in tiny models with the number of experts a
token that the published model has. "whole": of the model of two layers. Ours: Metal dispatches of a captured
decode step, counted in the simulator; on a Mac the column is left out.
"""

import os
import sys

import paths

if __name__ == "__main__":
    paths.words(__doc__)
    os.environ |= {"MOE_MPS_CAPTURE": "1", "MOE_MPS_CHECK": "0"}
    if sys.platform != "darwin":
        from support.simulated import install

        install()  # in front of whatever asks torch for MPS

import torch
from support import tiny_models
from support.launches import AttentionIsOne, Launches, captured_by_type, model_on_mps
from transformers import DynamicCache

import torch_moe_mps

EXPERTS_OF_A_TOKEN = {"mixtral": 2, "qwen3_moe": 8, "gpt_oss": 4}
EXPERTS, PEERS = 16, ("eager", "grouped_mm", "batched_mm")


def sizes(top_k: int) -> dict[str, int]:
    return {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": top_k}


def of_token(architecture: str, layers: int, top_k: int, experts: str) -> int:
    """Operators of aten of one token behind four."""
    with tiny_models.groups_of_32(), tiny_models.sizes(**sizes(top_k)):
        model = tiny_models.tiny_model(architecture, torch.bfloat16, num_hidden_layers=layers)
    model.set_experts_implementation(experts)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3, 4]]), past_key_values=cache, use_cache=True)
        with Launches() as mode, AttentionIsOne(mode):
            model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    return mode.counts.total()


def captured(architecture: str, top_k: int) -> str:
    """Dispatches of a layer, by its type where there are several."""
    if sys.platform == "darwin":
        return "-"
    import simulator

    with tiny_models.sizes(**sizes(top_k)):
        model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    found = captured_by_type(simulator, model)
    return ", ".join(f"{kind} {n.total()}".strip() for kind, n in found.items() if kind != "outside")


def row(architecture: str, top_k: int) -> str:
    cells = []
    for experts in PEERS:
        two, three = (of_token(architecture, layers, top_k, experts) for layers in (2, 3))
        cells.append(f"{three - two} (whole {two})")
    return f"| {architecture} | {top_k} | {' | '.join(cells)} | {captured(architecture, top_k)} |"


if __name__ == "__main__":
    print(f"| model | experts a token | {' | '.join(PEERS)} | ours, 4 bits, captured |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, count in EXPERTS_OF_A_TOKEN.items():
        print(row(name, count), flush=True)
