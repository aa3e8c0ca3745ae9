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
from ...attention.attention import NAME, Scores, attend, takes, wrap_sdpa
from ...attention.visible import Visible
from ...basics.report import Done
from ...basics.state import depends_on, original_class
from ...basics.tensors import Deferred
from ...trials.comparing import agrees, on_the_cpu, tried
from ...trials.draws import eager, normal, shows
from ...trials.replicas import bare_replica

_ATEN = torch.ops.aten
# Operators that a model applies to its bias: they give an element for each element.
_OF_ELEMENTS = (_ATEN._to_copy.default, _ATEN.mul.Tensor)
MOST_BYTES = 128 * 2**20  # for biases that a prompt has at a time


class BiasOfStates(Deferred):
    """[B, Hq, T, S], added to scores.

    Attributes:
        states: [B, T, Hq, R].
        bank: [R, E], the biases at each distance.
        make: gives the elements by the model's eager code.
        steps: applied to them since, each (function, arguments, options) behind the bias.
    """

    states: Tensor
    bank: Tensor
    make: Callable[[], Tensor]
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    _elements: Tensor | None

    @staticmethod
    def __new__(
        cls,
        states: Tensor,
        bank: Tensor,
        keys: int,
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (),
    ) -> "BiasOfStates":
        batch, tokens, heads, _ = states.shape
        shape = batch, heads, tokens, keys
        own = {"states": states, "bank": bank, "make": make, "steps": steps, "_elements": None}
        return cls.made(shape, dtype, states.device, **own)

    def elements(self) -> Tensor:
        if self._elements is None:
            elements = self.make()
            for function, arguments, options in self.steps:
                elements = function(elements, *arguments, **options)
            self._elements = elements
        return self._elements

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
        biases = (self.states[:, start:stop] @ self.bank).transpose(1, 2)
        for function, arguments, options in self.steps:
            passed = (_of_tokens(argument, start, stop) for argument in arguments)
            biases = function(biases, *passed, **options)
        return biases.transpose(1, 2)

    def _tokens_at_once(self) -> int:
        batch, _, heads, _ = self.states.shape
        return max(1, MOST_BYTES // max(1, batch * heads * self.bank.shape[1] * self.element_size()))

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _OF_ELEMENTS and type(args[0]) is cls and all(map(_is_of_rows, args[1:])):
            bias, *arguments = args
            like = [arg.new_empty((), device="meta") if isinstance(arg, Tensor) else arg for arg in arguments]
            passed = {name: value for name, value in kwargs.items() if name != "device"}
            dtype = func(torch.empty(1, dtype=bias.dtype, device="meta"), *like, **passed).dtype
            steps = (*bias.steps, (func, tuple(arguments), kwargs))
            keys = bias.shape[3]
            return cls(bias.states, bias.bank, keys, dtype, bias.make, steps)
        return NotImplemented


def _is_of_rows(argument: object) -> bool:
    """True if it is the same for all keys, so that it can be applied to biases of distances, too."""
    if type(argument) is Tensor or isinstance(argument, torch._subclasses.FakeTensor):
        return argument.dim() <= 4 and argument.shape[-1:] in ((), (1,))
    return not isinstance(argument, Tensor)


def _of_tokens(argument: Any, start: int, stop: int) -> Any:
    if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[-2] != 1:
        return argument[..., start:stop, :]
    return argument


def needs_ours(layer: nn.Module) -> bool:
    """True if an attention layer has a module that makes such a bias."""
    return any(map(makes_relative_bias, layer.children()))


def take_biases(layer: nn.Module) -> None:
    """Lets the implementations of such a layer take the bias by distance."""
    if needs_ours(layer):
        _wrap_implementations()


@functools.cache
def _wrap_implementations() -> None:
    from transformers import AttentionInterface

    wrap_sdpa()  # inside: it makes elements of masks
    for name in ("sdpa", NAME):
        own = AttentionInterface._global_mapping[name]
        AttentionInterface.register(name, functools.wraps(own)(functools.partial(_attention, name, own)))


def _attention(
    name: str,
    own: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    """`own`, an implementation of attention, or the operator where it is given such a bias."""
    position_bias = options.get("position_bias")
    if position_bias is not None:  # other models come here, too, and are asked nothing else
        sinks = options.get("sinks")
        plain = options.get("dropout", 0.0) == 0.0 and not options.get("output_attentions")
        plain = plain and options.get("is_causal") is not False and options.get("cache") is None
        plain = plain and (name == NAME or query.is_mps) and type(position_bias) is BiasOfStates
        if plain and takes(query, key, value, attention_mask, sinks):
            visible = Visible.by(attention_mask, query.shape[2], options.get("sliding_window"))
            scores = Scores(options.get("scaling"), options.get("softcap"), sinks)
            out = position_bias.attend(query, key, value, visible, scores)
            if out is not None:
                return out, None
    return own(module, query, key, value, attention_mask, **options)


# Recognising a module that makes such a bias


def relative_forward(
    module: nn.Module, states: Tensor, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """The forward of a rewritten module. States are [B, T, Hq, R], positions [T] and [S]."""
    if states.shape[1:2] != query_positions.shape:
        return NotImplemented
    own = original_class(module).forward
    make = functools.partial(own, module, states, query_positions, key_positions)
    return _bias(module, states, key_positions.shape[0], make)


def projected_forward(
    module: nn.Module, hidden: Tensor, relative_distance: Tensor, position_ids: Tensor
) -> Tensor:
    """The forward of a rewritten module that makes its states of `hidden` [B, T, D]; distances are [T, S]."""
    if hidden.dim() != 3 or relative_distance.shape[:-1] != hidden.shape[1:2]:
        return NotImplemented
    linear, norm = _linear_and_norm(module)
    heads = linear(hidden).view(*hidden.shape[:-1], -1, module.get_parameter("proj").shape[0])
    make = functools.partial(original_class(module).forward, module, hidden, relative_distance, position_ids)
    return _bias(module, norm(heads, position_ids), relative_distance.shape[-1], make)


def _bias(module: nn.Module, states: Tensor, keys: int, make: Callable[[], Tensor]) -> Tensor:
    bank = module.get_parameter("proj")
    if states.dim() != 4 or states.dtype != bank.dtype or states.dtype not in ACTIVATION_DTYPES:
        return NotImplemented
    return BiasOfStates(states, bank, keys, states.dtype, make)


def rewrite_relative_bias(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a module that makes such a bias, else None."""
    if not makes_relative_bias(module):
        return None
    forward = projected_forward if module._modules else relative_forward
    return forward, [Done("attention", "relative positions")]


@on_the_cpu()
def makes_relative_bias(module: nn.Module) -> bool:
    """True if its forward gives (states @ proj)[t, h, distance], 0 from `rel_extent` on and below 0.

    Without children it is given the states and positions of tokens and keys. With two it is given hidden
    states, distances and positions of tokens, and the states are norm(heads of linear(hidden), positions).
    """
    bank, extent = module._parameters.get("proj"), getattr(module, "rel_extent", None)
    if len(module._parameters) != 1 or bank is None or bank.dim() != 2 or bank.shape[1] != extent:
        return False
    parts = _linear_and_norm(module)
    if parts is None and module._modules:
        return False
    for name in ("rel_extent", *module._modules):
        depends_on(module, name)
    return shows(functools.partial(_gives_bias, module, bank, parts))


def _gives_bias(module: nn.Module, bank: Tensor, parts: Any) -> bool:
    """True if a module gives this bias for a draw's numbers."""
    replica, extent = bare_replica(module), 4
    heads = 2 if parts is None else parts[0].out_features // bank.shape[0]
    proj, states = normal(3, extent), normal(2, 5, heads, 3)
    replica.register_parameter("proj", nn.Parameter(proj, requires_grad=False))
    replica.rel_extent = extent
    queries, keys = torch.arange(6, 11), torch.arange(2, 13)
    distance = queries[:, None] - keys
    place = torch.where((distance >= 0) & (distance < extent), distance, extent)
    padded = nn.functional.pad(states @ proj, (0, 1)).transpose(1, 2)
    expected = padded.gather(3, place.expand(2, heads, -1, -1))
    forward = eager(original_class(module).forward)
    if parts is None:
        return agrees(expected, tried(forward, replica, states, queries, keys))
    hidden, projected = normal(2, 5, 6), states.flatten(2) + 1
    linear, norm = _Gives(projected), _Gives(states)
    for name, part in module._modules.items():
        replica.add_module(name, linear if part is parts[0] else norm)
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
