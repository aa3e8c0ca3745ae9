"""Hyper-connections: layers whose residual is several streams, which the blocks read as one row.

The modules that mix streams and the layers around them are recognised by running them on small numbers; what
a layer hands to its blocks, by blocks that note what they get.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ops.hyper_connection import MAX_STREAMS
from ...basics.reads import depends_on
from ...basics.report import Done
from ...basics.state import NOTHING, STATE, original_class, state_of
from ..experts import is_observed
from .trial import agrees, bare_twin, tried

ops = torch.ops.moe_mps

_TENSORS = (("fn", "base", "scale"), ("hc_fn", "hc_base", "hc_scale"))
_NUMBERS = ("hc_mult", "hc_eps", "eps", "hc_sinkhorn_iters", "hc_post_magnitude")
_WIDTH = 8  # of a stream in a trial
_BLOCKS = (("attn_hc", "input_layernorm", "self_attn"), ("ffn_hc", "post_attention_layernorm", "mlp"))
INPUT = "hidden_states"  # the argument of blocks that are called by keywords
_EXTRA = "moe_mps_extra"  # an argument of a layer that no signature has


# The modules that mix streams


class Mixing(NamedTuple):
    """What a module that mixes streams computes.

    Attributes:
        tensors: the names of its parameters.
        numbers: arguments of the operator.
        parts: those of fn.
    """

    tensors: tuple[str, str, str]
    numbers: dict[str, Any]
    parts: int


def connection_forward(module: nn.Module, hidden_streams: Tensor) -> Any:
    """What a block reads; behind the weights post and comb, as far as the module has them."""
    x, post, comb, _ = _connected(module, hidden_streams)
    parts: int = module.__dict__[STATE].formula.parts
    return x if parts == 1 else (post, x) if parts == 2 else (post, comb, x)


def _connected(module: nn.Module, streams: Tensor, **update: Tensor | None) -> tuple[Tensor, ...]:
    mixing: Mixing = module.__dict__[STATE].formula
    own = module._parameters
    found: tuple = ops.hyper_connection(streams, *map(own.get, mixing.tensors), **update, **mixing.numbers)
    return found


def rewrite_hyper_connection(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a module that mixes the streams of a hyper-connection, else None."""
    own = module._parameters
    tensors = next((names for names in _TENSORS if all(own.get(name) is not None for name in names)), None)
    count, norm = getattr(module, "hc_mult", 0), module._modules.get("input_norm")
    if tensors is None or norm is None or not isinstance(count, int) or not 1 <= count <= MAX_STREAMS:
        return None
    fn: Any = own[tensors[0]]
    rows = (count, 2 * count, (2 + count) * count)
    if fn.dim() != 2 or fn.shape[0] not in rows or fn.shape[1] % (4 * count):
        return None
    _rest_on(module)
    parts = rows.index(fn.shape[0]) + 1
    eps = getattr(module, "hc_eps", getattr(module, "eps", None))
    numbers = {
        "norm_eps": norm.eps,
        "eps": eps,
        "iterations": getattr(module, "hc_sinkhorn_iters", 1),
        "post_factor": getattr(module, "hc_post_magnitude", 2.0),
        "post_eps": eps if parts == 2 else 0.0,
    }
    mixing = Mixing(tensors, numbers, parts)
    if not tried(_mixes, module, mixing, count):
        return None
    state_of(module).formula = mixing
    return connection_forward, [Done("hyper_connection")]


def _rest_on(module: nn.Module) -> None:
    """Notes the numbers of a module that mixes streams."""
    for name in _NUMBERS:
        if hasattr(module, name):
            depends_on(module, name)
    depends_on(module._modules["input_norm"], "eps")


def _twin(module: nn.Module, mixing: Mixing, count: int) -> Any:
    """A module of the same class with few and random numbers."""
    twin = bare_twin(module)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        name: (tensor.shape[0], *[count * _WIDTH] * (tensor.dim() - 1))
        for name in mixing.tensors
        if (tensor := module._parameters[name]) is not None
    }
    numbers = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}
    parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in numbers.items()}
    norm: Any = module._modules["input_norm"]
    vars(twin).update(_parameters=parameters, _modules={"input_norm": bare_twin(norm)})
    state_of(twin).formula = mixing
    return twin


def _mixes(module: nn.Module, mixing: Mixing, count: int) -> bool:
    twin = _twin(module, mixing, count)
    streams = torch.randn(2, 3, count, _WIDTH, generator=torch.Generator().manual_seed(1))
    return agrees(connection_forward(twin, streams), original_class(module).forward(twin, streams))


# The layers around them


class Call(NamedTuple):
    """How a layer calls a block.

    Attributes:
        name: of the argument that is the block's input, None if it goes by position.
        given: {argument of the block: that of the layer}.
        takes_more: the block gets the arguments that the layer has no name for.
        results: how many the block gives, 0 for a tensor that is no tuple.
    """

    name: str | None
    given: dict[str, str]
    takes_more: bool
    results: int


class Layer(NamedTuple):
    """What the forward of a layer does beside the two blocks.

    Attributes:
        defaults: of its arguments behind the streams.
        calls: of the blocks.
        returned: of each result behind the streams, the place among those of the first block; None: None.
        is_tuple: the layer returns a tuple.
    """

    defaults: dict[str, Any]
    calls: tuple[Call, Call]
    returned: tuple[int | None, ...]
    is_tuple: bool


def layer_forward(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer with hyper-connections."""
    form: Layer = layer.__dict__[STATE].formula
    if is_observed(*(layer._modules[name] for name, *_ in _BLOCKS)):  # type: ignore[arg-type]
        return original_class(layer).forward(layer, hidden_states, *args, **kwargs)
    return _layer(layer, form, hidden_states, dict(zip(form.defaults, args, strict=False)) | kwargs)


def _layer(layer: nn.Module, form: Layer, streams: Tensor, given: dict[str, Any]) -> Any:
    more = {name: value for name, value in given.items() if name not in form.defaults}
    given = form.defaults | given
    children: dict[str, Any] = layer._modules
    others: tuple = ()
    update: dict[str, Tensor | None] = {}
    for call, (mixing, norm, block) in zip(form.calls, _BLOCKS, strict=True):
        x, post, comb, updated = _connected(children[mixing], streams, **update)
        streams = updated if update else streams
        options = {name: given[source] for name, source in call.given.items()}
        options |= more if call.takes_more else {}
        x = children[norm](x)
        out = (
            children[block](x, **options)
            if call.name is None
            else children[block](**{call.name: x}, **options)
        )
        first = out[0] if isinstance(out, tuple) else out
        others = others or (out if isinstance(out, tuple) else (out,))
        mixes = children[mixing].__dict__[STATE].formula.parts == 3
        update = {"out": first.to(streams.dtype), "post": post, "comb": comb if mixes else None}
    streams = ops.hyper_update(streams, **update)
    if not form.is_tuple:
        return streams
    return streams, *(None if place is None else others[place] for place in form.returned)


def rewrite_hyper_layer(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a layer whose blocks are between hyper-connections, else None."""
    children: dict[str, Any] = module._modules
    if not all(isinstance(children.get(name), nn.Module) for names in _BLOCKS for name in names):
        return None
    mixings = [children[mixing].__dict__.get(STATE, NOTHING).formula for mixing, *_ in _BLOCKS]
    if not all(isinstance(mixing, Mixing) and mixing.parts > 1 for mixing in mixings):
        return None
    for name, value in vars(module).items():
        if isinstance(value, bool | int | str) and name != "training":
            depends_on(module, name)
    for results in (0, 2, 3):
        form = tried(_form, module, mixings, results)
        if form is not None and tried(_is_layer, module, mixings, form):
            for mixing, *_ in _BLOCKS:
                depends_on(module, mixing)
                _rest_on(children[mixing])
            state_of(module).formula = form
            return layer_forward, [Done("hyper_connection"), Done("hyper_update")]
    return None


class _Doubled(nn.Module):
    """Stands in for a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class _Block(nn.Module):
    """Stands in for a block: notes its arguments and what it gives, so many results that differ by 1."""

    def __init__(self, factor: float, results: int):
        super().__init__()
        self.factor, self.results = factor, results
        self.seen: tuple[tuple, dict[str, Any]] = (), {}
        self.given: tuple[Tensor, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        x = self.factor * (args[0] if args else kwargs[INPUT]) + 1.0
        self.given = x, *(x + place for place in range(1, self.results))
        return self.given if self.results else x


def _twin_of_layer(module: nn.Module, mixings: list[Mixing], results: int) -> Any:
    children: dict[str, nn.Module] = {}
    for (mixing, norm, block), form, count in zip(_BLOCKS, mixings, (results, 0), strict=True):
        own: Any = module._modules[mixing]
        children |= {mixing: _twin(own, form, own.hc_mult), norm: _Doubled(), block: _Block(0.5, count)}
    twin = bare_twin(module)
    vars(twin).update(_modules=children)
    return twin


def _form(module: nn.Module, mixings: list[Mixing], results: int) -> Layer | None:
    """What the layer's forward does with blocks of so many results, as the arguments of its blocks show."""
    twin = _twin_of_layer(module, mixings, results)
    parameters = list(inspect.signature(original_class(module).forward).parameters.values())[2:]
    named = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    defaults = {each.name: each.default for each in named}
    marks = {name: object() for name in (*defaults, _EXTRA)}
    count = twin.attn_hc.hc_mult
    out = original_class(module).forward(twin, torch.ones(1, 2, count, _WIDTH), **marks)
    calls = tuple(_call(getattr(twin, block), marks) for *_, block in _BLOCKS)
    if None in calls:
        return None
    is_tuple = isinstance(out, tuple)
    returned = tuple(_place(twin.self_attn, each) for each in out[1:]) if is_tuple else ()
    return Layer(defaults, calls, returned, is_tuple)  # type: ignore[arg-type]


def _call(block: _Block, marks: dict[str, object]) -> Call | None:
    args, kwargs = block.seen
    names = {id(mark): name for name, mark in marks.items()}
    given = {name: names.get(id(value)) for name, value in kwargs.items() if name not in (INPUT, _EXTRA)}
    if len(args) + (INPUT in kwargs) != 1 or not all(given.values()):
        return None
    named = {name: source for name, source in given.items() if source is not None}
    return Call(None if args else INPUT, named, _EXTRA in kwargs, block.results)


def _place(block: _Block, result: Any) -> int | None:
    """Of a result of a layer: the place among those of the block."""
    if result is None:
        return None
    return next(place for place, own in enumerate(block.given) if place and torch.equal(result, own))


def _is_layer(module: nn.Module, mixings: list[Mixing], form: Layer) -> bool:
    """Whether a form gives what the layer's own forward gives."""
    twin = _twin_of_layer(module, mixings, form.calls[0].results)
    streams = torch.randn(2, 3, twin.attn_hc.hc_mult, _WIDTH, generator=torch.Generator().manual_seed(2))
    given: dict[str, Any] = dict.fromkeys(form.defaults)
    return agrees(_layer(twin, form, streams, given), original_class(module).forward(twin, streams, **given))
