"""The dtype of activations beside quantised weights: bfloat16 loses more of a model than 8 bits do.

float16 is as fast and has 8 times the precision, but ends at 65504. Whether a model stays below is measured:
the largest number that leaves or enters any of its modules while it reads a text. Such numbers belong to a
few channels of the first token and of separators, and hardly depend on the text: SmolLM2 has 21,500 to 23,700
over four texts, in 256 tokens as in 2048. So twice the largest one must be below the end.

Nothing is remembered: `convert` writes the dtype that it measured, and elsewhere each start measures. An
answer that overflows all the same ends with an error.

A CPU computes in float32 whatever the activations are, so that 16 bits only cost conversions there.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._faults import free
from ..models.basics.logits import watch
from .calibration import AUTO, text_for, tokens_of_text
from .own.config import is_ours
from .source import Source

MARGIN = 2
TOKENS = 256  # read to measure, at most
_END = torch.finfo(torch.float16).max


class Largest(NamedTuple):
    """Largest magnitude of a model's activations over a number of tokens; infinite for NaN."""

    value: float
    tokens: int


class Activations(NamedTuple):
    """Dtype of activations, and the reason for it; None is the checkpoint's dtype."""

    dtype: torch.dtype | None
    reason: str

    def __str__(self) -> str:
        name = "the checkpoint's dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"activations in {name}: {self.reason}"


def load_in_best(
    source: Source, quantises: bool, device: str, load: Callable[[torch.dtype | None], Any]
) -> tuple[Any, Activations]:
    """Loads a model in the most accurate 16-bit dtype. Returns: the model, and its activations.

    Args:
        quantises: whether its weights are quantised while it is loaded.
        load: loads it with a dtype of activations; None is the checkpoint's. A model that overflows in
            float16 is loaded twice.
    """
    known = _known(source, quantises, device)
    if known is not None:
        return _watched(load(known.dtype)), known
    try:
        ids = _tokens(source)
    except (ValueError, OSError):
        return load(None), Activations(None, "no tokenizer is there for a text to measure with")
    try:
        model = load(torch.float16)
    except ValueError:  # bfloat16 raises it again, if it is about anything else
        return load(torch.bfloat16), Activations(torch.bfloat16, "weights that float16 does not hold")
    activations = chosen(largest(model, ids))
    if activations.dtype == torch.float16:
        return _watched(model), activations
    del model
    free(torch.device(device))
    return load(torch.bfloat16), activations


def range_of(source: Source, device: str, load: Callable[[torch.dtype], Any]) -> Largest | None:
    """The range of a checkpoint's activations, from which `chosen` follows.

    Infinite for weights that float16 does not hold; None without a tokenizer, and for an encoder with a
    decoder.

    Args:
        load: loads it with a dtype of activations, on the device.
    """
    is_cpu = torch.device(device).type == "cpu"
    try:
        ids = _tokens(source)
        if source.config.is_encoder_decoder:
            return None
    except (ValueError, OSError):
        return None
    try:
        model = load(torch.float32 if is_cpu else torch.float16)
    except ValueError:
        return Largest(torch.inf, len(ids))
    return largest(model, ids)


def chosen(found: Largest) -> Activations:
    """float16 where a margin is left, else bfloat16."""
    limit = f"of {_END:,.0f}, while {found.tokens} tokens of a text are read"
    reached = f"reach {found.value:,.0f}" if found.value < torch.inf else "overflow their end"
    if found.value * MARGIN <= _END:
        return Activations(torch.float16, f"they {reached} {limit}")
    return Activations(torch.bfloat16, f"in float16 they {reached} {limit}")


def _watched(model: Any) -> Any:
    if model.dtype == torch.float16:
        watch(model)
    return model


def _known(source: Source, quantises: bool, device: str) -> Activations | None:
    """Activations that need no measurement, or None."""
    if not (quantises or source.stored or source.gguf is not None):
        return Activations(None, "the weights are dense")
    if is_ours(source.stored) and not quantises and source.skeleton().dtype == torch.float16:
        return Activations(None, "it was converted so")
    if torch.device(device).type == "cpu":
        return Activations(torch.float32, "16 bits are no faster on a CPU")
    if source.config.is_encoder_decoder:
        return Activations(None, "the range of an encoder with a decoder is not measured")
    return None


def _tokens(source: Source) -> Tensor:
    longest = getattr(source.config.get_text_config(), "max_position_embeddings", None) or TOKENS
    return tokens_of_text(source, text_for(AUTO), min(TOKENS, longest // 2))


@torch.no_grad()
def largest(model: nn.Module, ids: Tensor) -> Largest:
    """Largest magnitude among inputs and outputs of a model's modules in a forward of tokens [T]."""
    device = next(model.parameters()).device
    with _looked_at(model) as seen:
        model(input_ids=ids[None].to(device))
    value = float(torch.stack(seen).max()) if seen else 0.0
    return Largest(value if value == value else torch.inf, len(ids))


@contextlib.contextmanager
def _looked_at(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context that yields a list of the largest magnitude of each module call except the head's.

    A module with a hook runs eager, so that values inside a fused operator are seen, too.
    """
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: Any, result: Any) -> None:
        """Adds the largest magnitude of each floating-point tensor that enters or leaves the module."""
        for value in (*inputs, *(result if isinstance(result, tuple) else (result,))):
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                seen.append(value.abs().amax().float())

    generates: Any = model
    head = generates.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    hooks = [module.register_forward_hook(look) for module in model.modules() if module not in (model, head)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
