"""Biases of relative positions, without memory for each pair of a token and a key until something looks.

Each token has a bias for each distance of a key: a product of its states with a matrix. The attention of this
package takes the biases by distance, for some tokens of a prompt at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ...attention.attention import NAME, Scores, attend, takes
from ...attention.visible import Visible
from ...basics.report import Done
from ...basics.state import depends_on, original_class
from ...basics.tensors import Deferred
from ...trials.comparing import agrees, on_the_cpu, tried
from ...trials.draws import eager, in_each_draw, normal
from ...trials.replicas import bare_replica

MOST_BYTES = 128 * 2**20  # for biases that a prompt has at a time


class BiasOfStates(Deferred):
    """[B, Hq, T, S], added to scores.

    Attributes:
        states: [B, T, Hq, R].
        bank: [R, E], the biases at each distance.
        make: gives the elements by the model's eager code.
    """

    states: Tensor
    bank: Tensor
    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, states: Tensor, bank: Tensor, keys: int, make: Callable[[], Tensor]) -> "BiasOfStates":
        batch, tokens, heads, _ = states.shape
        shape, own = (batch, heads, tokens, keys), {"states": states, "bank": bank, "make": make}
        return cls.made(shape, states.dtype, states.device, **own)

    def elements(self) -> Tensor:
        return self.make()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Visible, scores: Scores
    ) -> Tensor | None:
        """The operator's attention with this bias, for some tokens at a time; None where it needs elements.

        Masks that are more than an order do not tell which key is a token's own. Sinks are [B, Hq, T, 1].
        """
        tokens, keys, sinks = query.shape[2], key.shape[2], scores.sinks
        if not visible.is_order or self.shape[2:] != (tokens, keys):
            return None
        if sinks is not None and sinks.shape != (*query.shape[:3], 1):
            return None
        outs, some = [], self._tokens_at_once()
        seen = keys if visible.seen is None else visible.seen
        for start in range(0, tokens, some):
            stop = min(start + some, tokens)
            of_tokens = None if sinks is None else sinks[:, :, start:stop, 0].mT
            of_scores = scores._replace(sinks=of_tokens, relative=self.by_distance(start, stop))
            part = query if some >= tokens else query[:, :, start:stop]
            shown = visible._replace(seen=seen - (tokens - stop))
            outs.append(attend(part, key, value, shown, of_scores))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def by_distance(self, start: int, stop: int) -> Tensor:
        """[B, T', Hq, E] of the tokens from `start` to `stop`, as the operator `attention` takes it."""
        return self.states[:, start:stop] @ self.bank

    def _tokens_at_once(self) -> int:
        batch, _, heads, _ = self.states.shape
        return max(1, MOST_BYTES // max(1, batch * heads * self.bank.shape[1] * self.element_size()))


def needs_ours(layer: nn.Module) -> bool:
    """True if an attention layer has a module that makes such a bias."""
    return any(map(makes_relative_bias, layer.children()))


def take_biases(layer: nn.Module) -> None:
    """Lets our implementation of such a layer's attention take the bias by distance."""
    if needs_ours(layer):
        _wrap_implementation()


@functools.cache
def _wrap_implementation() -> None:
    from transformers import AttentionInterface

    own = AttentionInterface._global_mapping[NAME]

    @functools.wraps(own)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        bias, sinks = options.get("position_bias"), options.get("sinks")
        plain = options.get("dropout", 0.0) == 0.0 and not options.get("output_attentions")
        if type(bias) is BiasOfStates and plain and takes(query, key, value, attention_mask, sinks):
            visible = Visible.by(attention_mask, query.shape[2], options.get("sliding_window"))
            out = bias.attend(query, key, value, visible, Scores(options.get("scaling"), None, sinks))
            if out is not None:
                return out, None
        return own(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(NAME, attention)


# Recognising a module that makes such a bias


def projected_forward(
    module: nn.Module, hidden: Tensor, relative_distance: Tensor, position_ids: Tensor
) -> Tensor:
    """The forward of a rewritten module, which makes its states of `hidden` [B, T, D]. Distances: [T, S]."""
    if hidden.dim() != 3 or relative_distance.shape[:-1] != hidden.shape[1:2]:
        return NotImplemented
    bank, (linear, norm) = module.get_parameter("proj"), _linear_and_norm(module)
    states = norm(linear(hidden).view(*hidden.shape[:-1], -1, bank.shape[0]), position_ids)
    if states.dim() != 4 or states.dtype != bank.dtype or states.dtype not in ACTIVATION_DTYPES:
        return NotImplemented
    make = functools.partial(original_class(module).forward, module, hidden, relative_distance, position_ids)
    return BiasOfStates(states, bank, relative_distance.shape[-1], make)


def rewrite_relative_bias(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a module that makes such a bias, else None."""
    if not makes_relative_bias(module):
        return None
    return projected_forward, [Done("attention", "relative positions")]


@on_the_cpu()
def makes_relative_bias(module: nn.Module) -> bool:
    """True if its forward gives (states @ proj)[t, h, distance], 0 from `rel_extent` on and below 0.

    It is given hidden states, distances and positions of tokens, and the states are
    norm(heads of linear(hidden), positions).
    """
    bank, extent = module._parameters.get("proj"), getattr(module, "rel_extent", None)
    if len(module._parameters) != 1 or bank is None or bank.dim() != 2 or bank.shape[1] != extent:
        return False
    if (parts := _linear_and_norm(module)) is None:
        return False
    for name in ("rel_extent", *module._modules):
        depends_on(module, name)
    return _gives_bias(module, bank, parts)


@in_each_draw
def _gives_bias(module: nn.Module, bank: Tensor, parts: Any) -> bool:
    """True if a module gives this bias."""
    replica, extent = bare_replica(module), 4
    heads = parts[0].out_features // bank.shape[0]
    proj, states = normal(3, extent), normal(2, 5, heads, 3)
    replica.register_parameter("proj", nn.Parameter(proj, requires_grad=False))
    replica.rel_extent = extent
    queries, keys = torch.arange(6, 11), torch.arange(2, 13)
    distance = queries[:, None] - keys
    place = torch.where((distance >= 0) & (distance < extent), distance, extent)
    padded = nn.functional.pad(states @ proj, (0, 1)).transpose(1, 2)
    expected = padded.gather(3, place.expand(2, heads, -1, -1))
    hidden, projected = normal(2, 5, 6), states.flatten(2) + 1
    linear, norm = _Gives(projected), _Gives(states)
    for name, part in module._modules.items():
        replica.add_module(name, linear if part is parts[0] else norm)
    forward = eager(original_class(module).forward)
    if not agrees(expected, tried(forward, replica, hidden, distance, queries[None])):
        return False
    of_norm = projected.view(states.shape), queries[None]
    return _are_equal(linear.given, (hidden,)) and _are_equal(norm.given, of_norm)


def _linear_and_norm(module: nn.Module) -> Any:
    """Children (linear layer, what follows it); None for other children."""
    parts = sorted(module.children(), key=lambda part: not hasattr(part, "out_features"))
    fits = len(parts) == 2 and hasattr(parts[0], "out_features") and not hasattr(parts[1], "out_features")
    return tuple(parts) if fits else None


class _Gives(nn.Module):
    """Child of a replica that notes its arguments, and returns its own result."""

    def __init__(self, result: Tensor):
        super().__init__()
        self.result = result
        self.given: tuple[Tensor, ...] = ()

    def forward(self, *given: Tensor) -> Tensor:
        self.given = given
        return self.result


def _are_equal(given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return len(given) == len(expected) and all(map(torch.equal, given, expected))
