"""`perplexity MODEL`: how well a model predicts a text, and how far it is from another one."""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAMPLE = Path(__file__).with_name("sample.txt")


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError with one line that says what is wrong."""
    from transformers import AutoTokenizer

    text = Path(options.text or SAMPLE).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0]
    if len(ids) < 2 or options.window < 2:
        raise ValueError(
            f"a text and a window of 2 tokens or more are needed, got {len(ids)} and {options.window}"
        )
    device = options.device or ("mps" if torch.backends.mps.is_available() else "cpu")
    model = _load(options.model, device)
    other = _load(options.against, device) if options.against else None
    result = measure(model, ids.to(device), options.window, other)
    print(f"{len(ids)} tokens in windows of {options.window}")
    print(f"perplexity {result['perplexity']:.4f}")
    if other is not None:
        print(f"perplexity of {options.against} {result['other']:.4f}")
        print(f"mean KL divergence from it {result['divergence']:.5f} nats a token")
        print(f"equal top tokens {100 * result['agreement']:.2f} %")


@torch.no_grad()
def measure(model: Callable, ids: Tensor, window: int, other: Callable | None = None) -> dict[str, float]:
    """Means over the predicted tokens of a text [T]: exp of the negative log likelihood, KL(other, model)."""
    sums, count = dict.fromkeys(("model", "other", "divergence", "agreement"), 0.0), 0
    for piece in _windows(ids, window):
        logs = _log_probabilities(model, piece)
        targets = piece[1:, None]
        sums["model"] -= float(logs.gather(1, targets).sum())
        count += len(targets)
        if other is not None:
            theirs = _log_probabilities(other, piece)
            sums["other"] -= float(theirs.gather(1, targets).sum())
            sums["divergence"] += float((theirs.exp() * (theirs - logs)).sum())
            sums["agreement"] += int((theirs.argmax(1) == logs.argmax(1)).sum())
    result = {"perplexity": math.exp(sums["model"] / count)}
    if other is not None:
        result |= {"other": math.exp(sums["other"] / count)}
        result |= {key: sums[key] / count for key in ("divergence", "agreement")}
    return result


def _windows(ids: Tensor, window: int) -> Iterator[Tensor]:
    from tqdm.auto import tqdm

    for first in tqdm(range(0, len(ids) - 1, window - 1), desc="Reading", unit="window"):
        yield ids[first : first + window]


def _log_probabilities(model: Callable, ids: Tensor) -> Tensor:
    """[T] -> [T - 1, V] in float32: of the token after each but the last."""
    return model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)


def _load(name: str, device: str) -> Any:
    from ..transformers.checkpoints.layerwise import check_files
    from ..transformers.checkpoints.loading import from_pretrained

    check_files(name)
    return from_pretrained(name, device_map=device)
