"""`perplexity MODEL ...`: how well models predict a text, and how far they are from another model."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._faults import free, synchronize
from .._progress import with_progress
from .._text import aligned
from ..checkpoints.calibration import SAMPLE
from ..models.programs import cache_argument, empty_cache, wide_logits
from .places import utf8_text
from .results import write_json
from .sources import (
    check_adapter,
    check_generates,
    folder_of,
    load_stored,
    tokenizer_of,
    usable_device,
    with_adapter,
)

# Tokens whose probabilities are kept of the model to compare with; all others are one class.
LIKELIEST = 1024


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError with a one-line message."""
    device = usable_device(options.device)
    sources = [folder_of(model, options.revision) for model in options.model]
    other = folder_of(options.against) if options.against else None
    for source in [*sources, *([other] if other else [])]:
        check_generates(options, source)
    ids, first = _text(options, sources)
    ids = ids[: options.tokens]
    chunks = windows(ids, first, options.window)
    print(f"{len(ids)} tokens in windows of {options.window}")
    result: list[Means] = []
    with tempfile.TemporaryDirectory() as folder:
        if other is not None:
            save_references(load_stored(options, other, device), chunks, Path(folder))
        for source in sources:
            free(device)
            result.append(_measured(options, source, device, chunks, Path(folder) if other else None))
    print("\n".join(aligned(_table(options, result), 1)))
    if other is not None and result[0].rest >= 1e-6:
        print(
            f"The divergence is at least that: the tokens behind the {LIKELIEST} likeliest, "
            f"with {100 * result[0].rest:.3f} % of the probability, count as one"
        )
    write_json(options.json, _as_json(options, len(ids), result))


def _text(options: argparse.Namespace, sources: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens of the text, and its leading tokens, which all of the models share.

    Raises: ValueError for models of several tokenizers, and for a text that is too short.
    """
    texts = [text_ids(source, options.text, options.trust_remote_code) for source in sources]
    for model, text in zip(options.model, texts, strict=True):
        if not all(map(torch.equal, text, texts[0])):
            raise ValueError(f"all models must have the tokenizer of {options.model[0]}, got {model}")
    if (count := len(texts[0][0])) < 2:
        raise ValueError(f"--text must have 2 tokens or more, got {count} in {options.text}")
    return texts[0]


def _measured(
    options: argparse.Namespace, source: str, device: str, chunks: list[Tensor], folder: Path | None
) -> "Means":
    """Means of a model over the text."""
    check_adapter(options, source)
    model = with_adapter(options, load_stored(options, source, device))
    quantizes = options.kv_bits != 16
    return measure(WithQuantizedCache(model, options.kv_bits) if quantizes else model, chunks, folder)


def _table(options: argparse.Namespace, found: list["Means"]) -> list[tuple[str, ...]]:
    """Rows of the printed table: its head, the model that others are compared with, and each model."""
    head = ("model", "perplexity", "KL divergence, nats a token", "equal top tokens")
    rows: list[tuple[str, ...]] = [head if options.against else head[:2]]
    if options.against:
        rows.append((options.against, f"{_exp(found[0].other):.4f}", "", ""))
    for model, means in zip(options.model, found, strict=True):
        rows.append((model, *means.figures())[: len(rows[0])])
    return rows


def _as_json(options: argparse.Namespace, tokens: int, found: list["Means"]) -> dict[str, Any]:
    """The content of --json: the settings, and the means of each model."""
    about = {"text": options.text, "tokens": tokens, "window": options.window, "kv_bits": options.kv_bits}
    if options.against:
        about |= {"against": options.against, "perplexity_of_other": _exp(found[0].other)}
    models = []
    for model, means in zip(options.model, found, strict=True):
        perplexity = _exp(means.loss)
        models.append(
            {"model": model, "perplexity": perplexity, "standard_error": perplexity * means.loss_error}
        )
        if options.against:
            kept = ("divergence", "divergence_error", "agreement", "rest")
            models[-1] |= {name: getattr(means, name) for name in kept}
    return about | {"models": models}


def _exp(mean: float) -> float:
    """exp, infinite where math.exp raises OverflowError."""
    return torch.tensor(mean, dtype=torch.float64).exp().item()


@dataclass
class Means:
    """Means over the predicted tokens of a text, in nats.

    Attributes:
        loss, other: the negative log likelihood in the model, and in the model it is compared with.
        divergence: KL(other, model), with the tokens behind the other's `LIKELIEST` as one class: never more
            than the whole divergence, and equal to it for a vocabulary of that size.
        agreement: the share of tokens where both have the same likeliest one.
        rest: the other's probability of the tokens that count as one class.
        loss_error, divergence_error: standard errors of these means, as if tokens were independent.
    """

    loss: float = 0.0
    other: float = 0.0
    divergence: float = 0.0
    agreement: float = 0.0
    rest: float = 0.0
    loss_error: float = 0.0
    divergence_error: float = 0.0

    def figures(self) -> tuple[str, str, str]:
        """Formatted perplexity, divergence and agreement."""
        perplexity = _exp(self.loss)
        divergence = f"{self.divergence:.5f} ± {self.divergence_error:.5f}"
        return (
            f"{perplexity:.4f} ± {perplexity * self.loss_error:.4f}",
            divergence,
            f"{100 * self.agreement:.2f} %",
        )


@torch.no_grad()
def save_references(model: Callable, chunks: list[Tensor], folder: Path) -> None:
    """Write what `measure` needs of the other model: a file for each chunk, 8 KB a token."""
    for index, chunk in enumerate(with_progress(chunks, "Reading, first model", "window")):
        logs = _log_probabilities(model, chunk)
        top, ids = logs.topk(min(LIKELIEST, logs.shape[1]), dim=1)
        target = logs.gather(1, chunk[1:, None].to(logs.device))
        kept = (top, ids.int(), logs.argmax(1), target)
        torch.save([tensor.cpu() for tensor in kept], folder / f"{index}.pt")
    synchronize(getattr(model, "device", "cpu"))


@torch.no_grad()
def measure(model: Callable, chunks: list[Tensor], folder: Path | None = None) -> Means:
    """Means over the predicted tokens of chunks [T] of a text.

    Args:
        folder: with the files that `save_references` wrote for the same chunks.
    """
    sums, count = Means(), 0  # sums of squares, in place of the errors
    for index, chunk in enumerate(with_progress(chunks, "Reading", "window")):
        logs = _log_probabilities(model, chunk)
        count += len(logs)
        losses = -logs.gather(1, chunk[1:, None].to(logs.device)).cpu().double()
        sums.loss += float(losses.sum())
        sums.loss_error += float(losses.square().sum())
        if folder is not None:
            top, ids, best, target = (t.to(logs.device) for t in torch.load(folder / f"{index}.pt"))
            sums.other -= float(target.sum())
            sums.agreement += float((best == logs.argmax(1)).sum())
            for name, value in _divergence(logs, top, ids.long()).items():
                setattr(sums, name, getattr(sums, name) + value)
    synchronize(getattr(model, "device", "cpu"))
    means = Means(*(getattr(sums, field.name) / count for field in fields(Means)))
    means.loss_error = _standard_error(means.loss_error, means.loss, count)
    means.divergence_error = _standard_error(means.divergence_error, means.divergence, count)
    return means


def _standard_error(squares: float, mean: float, count: int) -> float:
    """Standard error of a mean, from the mean of squares."""
    return (max(0.0, squares - mean * mean) / max(1, count - 1)) ** 0.5


def _divergence(logs: Tensor, top: Tensor, ids: Tensor) -> dict[str, float]:
    """KL(other, model) over the other's likeliest tokens [T, K] and one class for the rest, and its share.

    The class is summed in the model, not taken from one, so that no difference of large numbers is left.
    """
    result = (top.exp() * (top - logs.gather(1, ids))).sum(1)
    rest = (1 - top.exp().sum(1, dtype=torch.float32)).clamp(min=0)
    if ids.shape[1] == logs.shape[1]:
        rest = torch.zeros_like(rest)
    else:
        theirs = logs.scatter(1, ids, -torch.inf).logsumexp(1)
        result += torch.where(rest > 0, rest * (rest.clamp(min=1e-30).log() - theirs), 0)
    squares = float(result.cpu().double().square().sum())  # mps has no float64
    return {"divergence": float(result.sum()), "rest": float(rest.sum()), "divergence_error": squares}


def text_ids(source: str, text: str | None, trust_remote_code: bool = False) -> tuple[Tensor, Tensor]:
    """The tokens [T] of a text file, and the token [1] that the tokenizer puts in front, or none [0]."""
    text_read = utf8_text("--text", text or SAMPLE)
    tokenizer = tokenizer_of(source, trust_remote_code)
    ids = tokenizer(text_read, return_tensors="pt", verbose=False).input_ids[0]
    begins = len(ids) > 0 and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    return (ids[1:], ids[:1]) if begins else (ids, ids[:0])


def windows(ids: Tensor, first: Tensor, window: int) -> list[Tensor]:
    """Chunks of a text that predict each token once, but the first of the text.

    A chunk begins with `first`, or if that is empty with the last token of the chunk before it.
    """
    size, shared = window - len(first), 1 - len(first)
    starts = range(0, len(ids) - shared, size - shared)
    return [torch.cat((first, ids[start : start + size])) for start in starts]


def _log_probabilities(model: Callable, ids: Tensor) -> Tensor:
    """Log probabilities [T - 1, V], float32, of the tokens after each but the last of [T]."""
    device = getattr(model, "device", ids.device)
    with wide_logits():
        logits = model(input_ids=ids[None].to(device)).logits
    return logits[0, :-1].float().log_softmax(-1)


class WithQuantizedCache:
    """A model whose tokens see the keys and values of a cache in so many bits."""

    def __init__(self, model: Any, bits: Any) -> None:
        self.model, self.bits, self.device = model, bits, model.device

    def __call__(self, input_ids: Tensor) -> Any:
        cache = empty_cache(self.model, self.bits)
        return self.model(input_ids=input_ids, **cache_argument(self.model, cache), use_cache=True)
