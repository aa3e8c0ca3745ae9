"""Importance matrix: the mean square of each input of each weight matrix.

For inputs without correlation, a change of weights by d changes an output by the mean square

    sum mean(x^2) d^2

so that this is what quantising weighs errors with (`ops/families/quantize.py`). It is collected by running a
text through a model as it runs, dense or quantised: these means hardly change. A file is safetensors: a
tensor for each matrix, [C], or [E, C] of experts, and metadata with the name of the model, the hash of the
text, and the tokens that were counted.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._progress import with_progress
from ...models.basics.interface import count_of, on_disk_of
from ...models.modules.experts import activated_rows
from ...models.modules.linears import GroupedLinear, QuantizedLinear
from ...ops._checks import Check
from ...quantization.formats import check_importance, check_weighed
from .reasons import groups_of
from .target import Target, quantizable
from .tied import tied_layers

# Fewer tokens say little: most experts would see none.
LEAST_TOKENS = 512
WINDOW = 512
PRIOR = 32  # the mean of all experts counts as so many tokens of each
_KIND = "moe_mps_importance"
_CHECK = Check("importance")


@dataclass(eq=False)
class Importance:
    """Mean squared activation per input column, keyed by matrix path.

    Attributes:
        means: {path: float32 [C], or of a stack of matrices [E, C]}.
        tokens: number of calibration tokens; 0 if unknown.
        model: name of the model, without local folders; "" if unknown.
        text: SHA-256 of the text; "" if unknown.
    """

    means: dict[str, Tensor]
    tokens: int = 0
    model: str = ""
    text: str = ""

    def __str__(self) -> str:
        tokens = f"{self.tokens} tokens" if self.tokens else "a file"
        return f"importance of {tokens}" + (f" through {self.model}" if self.model else "")

    def save(self, file: str | Path) -> None:
        from safetensors.torch import save_file

        metadata = {"kind": _KIND, "model": self.model, "text": self.text, "tokens": str(self.tokens)}
        save_file({name: mean.contiguous() for name, mean in self.means.items()}, file, metadata)

    def digest(self) -> str:
        """Digest of the means."""
        result = hashlib.sha256()
        for name in sorted(self.means):
            result.update(name.encode())
            result.update(self.means[name].numpy().tobytes())
        return result.hexdigest()

    def assign(self, model: nn.Module, targets: Mapping[str, Target]) -> str:
        """Assigns the mean squares of its inputs to each target; tied layers share theirs.

        Returns: a line for the report.

        Raises: ValueError for the importance of another model (a shape that does not fit, or no mean for any
            of these targets), and for targets of a format that it cannot choose.
        """
        means = dict(self.means)
        for name, other in tied_layers(model).items():
            both = means.get(name, means.get(other))
            if both is not None:
                means[name] = means[other] = both
        count = result = 0
        for target in targets.values():
            for parameter in target.formats:
                path, count = target.path(parameter), count + 1
                if path not in means:
                    continue
                check_weighed(_CHECK, target.formats[parameter], path)
                weight = target.rows_first(target.dense(parameter))
                target.importance[parameter] = _fitting(path, means[path], weight, target.kind)
                result += 1
        if targets and not result:
            known, asked = next(iter(self.means), "nothing"), next(iter(targets))
            got = f"that of another{f', {self.model}' if self.model else ''}, which has {known}"
            _CHECK.fail("importance", f"of the model, which has {asked}", got)
        return f"{self}, for {result} of {count} matrices"


def _fitting(path: str, mean: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Mean squares as [E, C]; E divides the rows of a layer that is several matrices."""
    matrices, rows, columns = weight.shape
    stack = mean if mean.dim() == 2 else mean.unsqueeze(0)
    fits = stack.shape[-1] == columns and mean.dim() in (1, 2)
    fits = fits and (len(stack) == matrices if kind == "experts" else rows % len(stack) == 0)
    if not fits:
        expected = (matrices, columns) if kind == "experts" else (columns,)
        _CHECK.fail(path, f"of shape {expected}, as the model has it", tuple(mean.shape))
    return stack


def read_importance(file: str | Path) -> Importance:
    """Importance of a file that `Importance.save` wrote.

    Raises: ValueError for a file of another kind, or damaged, or with numbers that are no mean squares.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(file)
    if not path.is_file():
        raise ValueError(f"moe_mps::importance: the file {path} does not exist")
    try:
        with safe_open(path, framework="pt") as tensors:
            about = tensors.metadata() or {}
            means = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"moe_mps::importance: {path.name} is no file of importance: {error}") from None
    if about.get("kind") != _KIND:
        got = f"a safetensors file of another kind, with {next(iter(means), 'nothing')}"
        _CHECK.fail(path.name, "written by Importance.save", got)
    for name, mean in means.items():
        if mean.dtype != torch.float32 or mean.dim() not in (1, 2):
            got = f"{mean.dtype} {tuple(mean.shape)}"
            _CHECK.fail(f"{name} in {path.name}", "float32 [C] or [E, C]", got)
        check_importance(_CHECK, f"{name} in {path.name}", mean)
    return Importance(means, int(about.get("tokens", 0)), about.get("model", ""), about.get("text", ""))


def given_importance(
    function: str, importance: Importance | str | os.PathLike | None, quantises: bool
) -> Importance | None:
    """Importance given as an argument: the object, or a file.

    Raises: what `read_importance` does, and ValueError where nothing is quantised, and TypeError.
    """
    if importance is None or isinstance(importance, Importance):
        result = importance
    elif isinstance(importance, str | os.PathLike):
        result = read_importance(Path(importance))
    else:
        expected, got = "an Importance or a file of it", type(importance).__name__
        raise TypeError(f"moe_mps::{function}: importance must be {expected}, got {got}")
    if result is not None and not quantises:
        raise ValueError(f"moe_mps::{function}: importance needs bits or a mode, got neither")
    return result


def is_file_of_importance(path: Path) -> bool:
    """True if a file name has the extension of an importance file."""
    return path.suffix == ".safetensors"


# Collecting


@torch.no_grad()
def collect_importance(model: nn.Module, ids: Tensor, *, text: str = "", progress: bool = True) -> Importance:
    """Computes the importance matrix of a language model from tokens.

    Args:
        model: of transformers, dense or quantised, accelerated or not, in evaluation mode.
        ids: [T] tokens of a text, at least 512; they run in windows of 512.
        text: their text, whose hash the file stores; by default the hash of the ids.
        progress: shows the progress on stderr.

    Returns: the means, for `accelerate`, `from_pretrained` and `Importance.save`. Experts that few tokens
        reach are blended with all of their layer; one without tokens has the mean of those.

    Raises: ValueError for fewer tokens, and for activations that are not finite.
    """
    if not isinstance(ids, Tensor):
        expected = "tokens [T] of a text, as tokenizer(text, return_tensors='pt').input_ids[0] gives them"
        _CHECK.fail("ids", expected, f"a {type(ids).__name__}")
    if ids.dim() != 1 or len(ids) < LEAST_TOKENS:
        expected = f"[T], the tokens of a text, at least {LEAST_TOKENS}"
        _CHECK.fail("ids", expected, f"{tuple(ids.shape)}: too little text" if ids.dim() == 1 else ids.shape)
    called: Any = model
    device = next(model.parameters()).device
    counts: dict[str, _Sums] = {}
    with ExitStack() as hooks:
        for target in _multiplied(model):
            hook = _hook(target, counts)
            hooks.callback(target.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for window in with_progress(ids.split(WINDOW), "Calibrating", "window", wanted=progress):
            called(input_ids=window[None].to(device), use_cache=False)
    means: dict[str, Tensor] = {}
    for name, found in counts.items():
        if isinstance(found.sums, Tensor) and isinstance(found.counts, Tensor) and bool(found.counts.any()):
            means[name] = _means(found.sums, found.counts)
    for name, mean in means.items():
        check_importance(_CHECK, f"what {name} multiplies", mean)
    contents = text.encode() if text else ids.cpu().numpy().tobytes()
    return Importance(means, len(ids), _name_of(model), hashlib.sha256(contents).hexdigest())


def _name_of(model: nn.Module) -> str:
    """The name on the Hub, or the last part of a folder's."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    is_on_the_hub = name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).exists()
    return name if is_on_the_hub else Path(name).name


class _Sums:
    """Sums of squares [n, C] of n matrices, and their numbers of tokens."""

    def __init__(self) -> None:
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0

    def add(self, squares: Tensor, counts: Tensor) -> None:
        self.sums, self.counts = self.sums + squares.cpu(), self.counts + counts.cpu()


def _hook(target: Target, into: dict[str, _Sums]) -> Callable[..., None]:
    """Forward hook that adds the squared inputs of a layer, or of experts."""
    if target.kind == "experts":
        if (on_disk := on_disk_of(target.module)) is not None:
            on_disk.refuse("importance needs all experts in memory")
        for parameter in target.parameters:
            into[target.path(parameter)] = _Sums()
        return lambda _, args, kwargs: _count_experts(target, args, kwargs, into)
    layer: Any = target.module
    groups = layer.n_groups if isinstance(layer, GroupedLinear) else groups_of(layer)
    sums = into[target.name] = _Sums()
    sums.add(torch.zeros(groups or 1, layer.in_features), torch.zeros(groups or 1))
    return lambda _, args, kwargs: _count_layer(args, kwargs, groups is not None, sums)


def _multiplied(model: nn.Module) -> Iterator[Target]:
    """Experts that are called with ids, and linear layers of a model, dense or quantised."""
    for target in quantizable(model).values():
        is_known = target.kind != "experts" or target.experts.is_called_with_ids
        if is_known and not isinstance(target.module, nn.Embedding):
            yield target
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield Target(name, module, "linears")


def _count_layer(args: Any, kwargs: Mapping[str, Any], grouped: bool, into: _Sums) -> None:
    """Adds the squares of a call's inputs to the sums of a linear layer."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    squares = x.float().square()
    squares = squares.flatten(0, -3) if grouped else squares.flatten(0, -2).unsqueeze(1)
    count = torch.full((squares.shape[1],), float(len(squares)), device=x.device)
    into.add(squares.sum(0), count)


def _count_experts(target: Target, args: tuple, kwargs: Mapping[str, Any], into: Mapping[str, _Sums]) -> None:
    """Adds the squared inputs of each expert, by a product with a one-hot matrix instead of atomics."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    x, ids, _ = [*args, *(kwargs[name] for name in names[len(args) :])]
    x = x.flatten(0, -2)
    first, second = target.parameters
    of_experts = torch.arange(count_of(target.module), device=ids.device)[:, None]
    chosen = (ids.flatten() == of_experts).float()  # [E, T * K]
    tokens = chosen.unflatten(1, ids.shape).sum(-1)
    counts = chosen.sum(1)
    into[target.path(first)].add(tokens @ x.float().square(), counts)
    valid = ids.clamp(0, len(of_experts) - 1)
    rows = activated_rows(target.module, x, valid).flatten(0, 1)
    into[target.path(second)].add(chosen @ rows.float().square(), counts)


def _means(sums: Tensor, counts: Tensor) -> Tensor:
    """Sums of squares [n, C] of n matrices of a layer, and their tokens [n], as means.

    Those with few tokens take much of the mean of all; those without take it whole.
    """
    if len(sums) == 1:
        return (sums / counts[:, None]).squeeze(0)
    return (sums + PRIOR * sums.sum(0) / counts.sum()) / (counts[:, None] + PRIOR)
