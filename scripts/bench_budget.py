"""Writes docs/budget.md: what recipes cost a small model that is trained here.

    python scripts/bench_budget.py [--steps 700] [--out docs/budget.md]

The model is a Qwen3-MoE of a million weights on bytes; the text is Python's own manual, as `pydoc` has it.
"""

import argparse
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import transformers
from torch import Tensor

import torch_moe_mps
from torch_moe_mps.commands.perplexity import WithQuantizedCache, measure, save_references, windows
from torch_moe_mps.commands.recipes import mixed_overrides
from torch_moe_mps.transformers.checkpoints.parts import Parts

GROUP_SIZE = 32
WINDOW = 256
HEAD = """# Quality of recipes

Perplexity of a small Mixture-of-Experts model over text that it was not trained on. **This is no claim about
large models**: the model has {weights:.2f} million weights, reads bytes, and saw {seen:.1f} million of them.
It compares `--budget` with uniform bits and with mlx-lm's mixed recipe at equal sizes, on a model that is
trained in minutes.

The model is a Qwen3-MoE (4 layers, 8 experts, 2 a token), trained for {steps} steps on nine tenths of the
topics of `pydoc` (Python {python}), in bfloat16; perplexity a byte and KL divergence from the dense model
over {tested} bytes of the rest, in windows of {window}. `--budget` measures on {calibration} bytes of the
training text. Groups of {group}. Written by `python scripts/bench_budget.py --out docs/budget.md`.

| recipe | kB | perplexity | KL divergence (nats a byte) | equal top bytes |
|---|---|---|---|---|
"""


FOOT = """
The dense model with keys and values in 8 bits (`kv_bits=8`, groups of 32, the width of its heads): perplexity
{perplexity:.4f} instead of {dense:.4f}, KL divergence {divergence:.5f}, equal top bytes {agreement:.1f} %.
"""


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on and to test with."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    data = torch.tensor(list(text.encode()))
    count = int(0.9 * len(data))
    return data[:count], data[count:]


def train(data: Tensor, steps: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.01, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, max(2, steps), pct_start=0.1)
    for step in range(steps):
        first = torch.randint(0, len(data) - 128, (16,))
        batch = torch.stack([data[i : i + 128] for i in first])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} s", file=sys.stderr)
    model.config.output_router_logits = False
    return model.to(torch.bfloat16).eval()


def recipes(folder: str, dense: Any, ids: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Uniform and mixed recipes, and for each what `--budget` finds in as many bytes."""
    mixed = mixed_overrides("mixed_4_6", dense)
    for name, recipe in (
        ("3 bits", {"bits": 3, "group_size": GROUP_SIZE}),
        ("4 bits", {"bits": 4, "group_size": GROUP_SIZE}),
        ("mixed_4_6", {"bits": 4, "group_size": GROUP_SIZE, "overrides": mixed}),
    ):
        yield name, recipe
        report = load(folder, **recipe).hf_quantizer.report
        budget = 16 * report.quantized_bytes / report.dense_bytes
        with Parts(folder) as checkpoint:
            found = torch_moe_mps.measured_recipe(checkpoint, ids, budget, GROUP_SIZE, progress=False)
        yield f"--budget {budget:.3f}", found


def load(folder: str, **recipe: Any) -> transformers.PreTrainedModel:
    return torch_moe_mps.from_pretrained(folder, **recipe)


def table(steps: int, tested: int) -> str:
    data, rest = corpus()
    ids = data[: 8 * WINDOW].view(8, WINDOW)
    with tempfile.TemporaryDirectory() as folder:
        train(data, steps).save_pretrained(folder)
        dense = load(folder)
        rows = [("dense, bfloat16", {}), *recipes(folder, dense, ids)]
        pieces = windows(rest[:tested], rest[:0], WINDOW)
        save_references(dense, pieces, Path(folder))
        lines = [row(name, load(folder, **recipe), pieces, Path(folder)) for name, recipe in rows]
        foot = of_cache(dense, pieces, Path(folder))
    weights = sum(p.numel() for p in dense.parameters())
    head = HEAD.format(
        weights=weights / 1e6, seen=steps * 16 * 128 / 1e6, steps=steps, window=WINDOW, group=GROUP_SIZE,
        tested=min(tested, len(rest)), calibration=ids.numel(), python=platform.python_version(),
    )  # fmt: skip
    return head + "\n".join(lines) + "\n" + foot


def row(name: str, model: Any, pieces: list[Tensor], references: Path) -> str:
    size = sum(p.nbytes for p in model.parameters()) / 1e3
    means = measure(model, pieces, references)
    return (
        f"| {name} | {size:.0f} | {math.exp(means.loss):.4f} | {means.divergence:.5f} "
        f"| {100 * means.agreement:.1f} % |"
    )


def of_cache(model: Any, pieces: list[Tensor], references: Path) -> str:
    means = measure(WithQuantizedCache(model), pieces, references)
    return FOOT.format(
        perplexity=math.exp(means.loss),
        dense=math.exp(means.other),
        divergence=means.divergence,
        agreement=100 * means.agreement,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700, help="of training, 0.2 s each on one core (700)")
    parser.add_argument("--bytes", type=int, default=40000, help="of text to test with (40000)")
    parser.add_argument("--out", default=None, help="file to write; printed unless given")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    result = table(options.steps, options.bytes)
    if options.out is None:
        print(result)
    else:
        Path(options.out).write_text(result)


if __name__ == "__main__":
    main()
