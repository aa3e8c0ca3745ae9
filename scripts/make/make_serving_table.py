"""Writes the rows of serving in tests/pinned/models.txt: what each architecture can do when it is served.

Nothing is written by hand: tiny models with random weights answer prompts, and their calls are counted.
With names of architectures it prints their rows, and writes nothing.
"""

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import paths

if __name__ == "__main__":
    NAMED = paths.words(__doc__, "architecture")

import models_page
import torch
import transformers
from support import tiny_models
from support.models import tiny
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps.serving.engine.drafter import Drafter
from torch_moe_mps.serving.engine.memory import MOST_ROWS

HEAD = "Architecture | Experts | mlx-lm | Batched | Prefix cache | Speculative"
NEW = 6  # tokens of an answer


def in_mlx_lm() -> set[str]:
    """Types of models that the installed mlx-lm has, by its files and its table of other names."""
    folder = Path(importlib.util.find_spec("mlx_lm").origin).parent
    files = {path.stem for path in (folder / "models").glob("[!_]*")}
    table = re.search(r"^MODEL_REMAPPING = (\{.*?\})", (folder / "utils.py").read_text(), re.S | re.M)[1]
    return files | {name for name, file in eval(table).items() if file in files}


def missing_in_mlx_lm() -> list[str]:
    """The Mixture-of-Experts architectures that the installed mlx-lm does not have."""
    return [name for name in tiny_models.architectures() if name not in in_mlx_lm()]


class Calls:
    """The sequences and the tokens of each call of a model."""

    def __init__(self, model: Any):
        self.shapes: list[torch.Size] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def tokens(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def _count(self, module: Any, given: Any, named: dict[str, Any]) -> None:
        ids = named.get("input_ids", given[0] if given else None)
        if ids is not None:
            self.shapes.append(ids.shape)


class Known(Drafter):
    """Drafts the tokens that an answer is known to have."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def draft(self, rows: Any) -> list[list[int]]:
        return [self.tokens[len(row.tokens) :][: row.max_drafts] for row in rows]


def abilities(architecture: str) -> list[str]:
    """Batched, prefix cache and speculative: "yes", "no", or "-"."""
    model = tiny(architecture).eval()
    if not model.can_generate():
        return ["-"] * 3
    torch_moe_mps.accelerate(model)
    calls = Calls(model)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)

    def answers(*prompts: list[int], **more: Any) -> list[list[int]]:
        calls.shapes.clear()
        ids = [torch.tensor(prompt) for prompt in prompts]
        made = torch_moe_mps.generate_batch(model, ids, config, progress=False, **more)
        return [answer.tolist() for answer in made]

    first = [number % 23 + 2 for number in range(40)]
    try:
        (alone,) = answers(first)
    except Exception:  # whatever code that reads pictures alone raises
        return ["-"] * 3
    others = [[number, 6, 7, 8] for number in range(2, 2 + MOST_ROWS)]
    turn = [*first, *alone, 9, 10]
    answers(first, *others, [11, *turn[1:]])  # the last one begins where another has ended
    tokens = calls.tokens()
    batched = max(shape[0] for shape in calls.shapes) > 1
    answers(first, *others, turn)
    cached = calls.tokens() < tokens - len(first) // 2
    answers(first, speculative=Known([*first, *alone]), draft_width=2)
    drafted = any(1 < shape[1] < 4 for shape in calls.shapes)
    return ["yes" if found else "no" for found in (batched, cached, drafted)]


def row(architecture: str) -> str:
    has_experts = architecture in tiny_models.architectures()
    cells = [architecture, "yes" if has_experts else "no"]
    cells += ["yes" if architecture in in_mlx_lm() else "no", *abilities(architecture)]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    logging.disable()
    if NAMED:
        print("\n".join(map(row, NAMED)))
    else:
        names = sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES})
        models_page.write({models_page.SERVING: [HEAD, *map(row, names)]})
