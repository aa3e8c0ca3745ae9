"""Latent attention without its expansion: few new tokens attend to the latents that a cache holds.

transformers' latent attention expands the latents of the whole context into keys and values for each new
token, by its method `expand_kv`. But for a head with keys W_k c and values W_v c, q . W_k c = (W_k^T q) . c,
and the sum of p W_v c is W_v times the sum of p c: the query absorbs W_k, all heads read the same latents,
and W_v projects the output. `expand_kv` returns `LazyLatents` here, which the attention of this package reads
as latents. Any other reader gets the expanded keys and values.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops._checks import dtype_name
from ...ops._decoded import with_decoded_weights
from ..basics.guards import is_observed
from ..basics.report import Done
from ..basics.state import EMPTY_STATE, STATE, state_of
from ..basics.tensors import Deferred
from ..basics.unmodified import refusal
from ..caches.growing import latents_together
from ..caches.quantized_states import QuantizedStates
from ..caches.tiled_states import TiledStates
from ..modules.linears import QuantizedLinear
from ..trials.comparing import tried

ops = torch.ops.moe_mps

# The most tokens of a call that attends to latents without expanding them. A query and key take 2 L + R
# products instead of N + R + V, but the expansion, L (N + V) a key, is saved: less up to 154 tokens and more,
# for real widths. Latents in tiles are never expanded: each token reads its own tile as it is.
MOST_TOKENS = 128
# The most bytes of keys and values that a prompt's latents are expanded into at a time.
MOST_BYTES = 128 * 2**20
METHOD = "expand_kv"


class Expansion(NamedTuple):
    """keys = (W_k c, r) and values = W_v c of latents c and a rotated part r that all heads share.

    Attributes:
        projection: the name of the linear layer that holds W_k and W_v of each head, one below the other.
        heads, key_rows, value_rows: its rows are heads * (key_rows + value_rows).
    """

    projection: str
    heads: int
    key_rows: int
    value_rows: int


class LazyLatents(Deferred):
    """Keys or values that are expanded from latents when they are read.

    Attributes:
        source: what both are expanded from.
        number: 0 for keys, 1 for values.
    """

    source: "Latents"
    number: int

    @staticmethod
    def __new__(cls, source: "Latents", number: int, heads: int, width: int) -> "LazyLatents":
        latents = source.latents
        shape = (latents.shape[0], heads, latents.shape[2], width)
        return cls.made(shape, latents.dtype, latents.device, source=source, number=number)

    def elements(self) -> Tensor:
        return self.source.expanded()[self.number]


class Latents:
    """Latents from which keys and values of a layer are expanded.

    Attributes:
        latents: [B, 1, S, L].
        rotated: [B, 1, S, R].
    """

    def __init__(self, module: nn.Module, eager_method: Callable, latents: Tensor, rotated: Tensor):
        self.module, self.own, self.latents, self.rotated = module, eager_method, latents, rotated
        self._expanded: tuple[Tensor, Tensor] | None = None

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys [B, Hq, S, N + R] and values [B, Hq, S, V] by the eager code of the layer."""
        if self._expanded is None:
            self._expanded = self.own(self.module, self.latents, self.rotated)
        return self._expanded

    def some_heads(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(heads, their keys, their values), as many heads at a time as MOST_BYTES allow, at least one.

        Nothing where all heads are no more, and where the eager code must run.
        """
        form: Expansion = self.module.__dict__[STATE].expansion
        layer: Any = getattr(self.module, form.projection, None)
        rows = form.key_rows + form.value_rows
        batch, _, keys, rotary = self.rotated.shape
        bytes_of_head = batch * keys * (rows + rotary) * self.latents.element_size()
        heads = max(1, MOST_BYTES // max(1, bytes_of_head))
        if heads >= form.heads or _operator_for(layer) is None or layer.weight.dtype != self.latents.dtype:
            return
        latents, rotated = (
            part.elements() if isinstance(part, Deferred) else part for part in (self.latents, self.rotated)
        )
        for first in range(0, form.heads, heads):
            some = slice(first, min(first + heads, form.heads))
            expanded = _rows_product(layer, slice(some.start * rows, some.stop * rows), latents)
            unrotated, values = (
                expanded.view(batch, keys, -1, rows)
                .transpose(1, 2)
                .split_with_sizes((form.key_rows, form.value_rows), -1)
            )
            yield some, torch.cat((unrotated, rotated.expand(-1, unrotated.shape[1], -1, -1)), -1), values

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """[B, 1, S, L + R], where a growing cache has them, else a copy; and its first L columns."""
        if self._share_tiles():
            assert isinstance(self.latents, TiledStates)
            width = self.latents.shape[3]
            return self.latents.columns(0, width + self.rotated.shape[3]), self.latents.columns(0, width)
        keys = latents_together(self.latents, self.rotated)
        if keys is None:
            keys = torch.cat((self.latents, self.rotated), -1)
        widths = self.latents.shape[3], self.rotated.shape[3]
        if isinstance(keys, QuantizedStates):
            return keys, keys.columns(widths)[0]
        return keys, keys[..., : widths[0]]

    def _share_tiles(self) -> bool:
        tiles = getattr(self.latents, "tiles", None)
        return tiles is not None and tiles is getattr(self.rotated, "tiles", None)

    def absorb_query(self, query: Tensor) -> Tensor | None:
        """Queries [B, Hq, T, N + R] multiplied by W_k: [B, Hq, T, L + R], which attend to the latents.

        None where the eager code must run.
        """
        form: Expansion = self.module.__dict__[STATE].expansion
        layer: Any = getattr(self.module, form.projection, None)
        width = form.key_rows + self.rotated.shape[3]
        many = query.shape[2] > MOST_TOKENS and not self._share_tiles()
        if many or query.shape[1] != form.heads or query.shape[3] != width:
            return None
        if _operator_for(layer) is None or not layer.weight.dtype == query.dtype == self.latents.dtype:
            return None
        unrotated, tail = query.transpose(1, 2).split_with_sizes((form.key_rows, self.rotated.shape[3]), -1)
        rows = slice(form.key_rows)
        return _product(layer, form, rows, unrotated, transposed=True, appended=tail).transpose(1, 2)

    def project_output(self, sums: Tensor) -> Tensor:
        """Attention output over latents, [B, T, Hq, L] float32, multiplied by W_v: [B, T, Hq, V]."""
        form: Expansion = self.module.__dict__[STATE].expansion
        layer = getattr(self.module, form.projection)
        options = {} if type(layer) is nn.Linear else {"dtype": dtype_name(self.latents.dtype)}
        return _product(layer, form, slice(form.key_rows, None), sums, **options)


def _product(layer: Any, form: Expansion, rows: slice, x: Tensor, **options: Any) -> Tensor:
    """Product of each head's part of `x` with some of the head's rows of a layer."""

    def of_heads(matrix: Tensor) -> Tensor:
        return matrix.view(form.heads, form.key_rows + form.value_rows, matrix.shape[1])[:, rows]

    if type(layer) is nn.Linear:
        return ops._heads_mm(x, of_heads(layer.weight), **options)
    packed, scales, biases, _ = layer.weights()
    weight = of_heads(packed), of_heads(scales), None if biases is None else of_heads(biases)
    compute = partial(ops._heads_quantized, x, *weight, layer.format.name, **options)
    return with_decoded_weights(compute, layer, packed, scales, biases) if x.is_cpu else compute()


def _rows_product(layer: Any, rows: slice, x: Tensor) -> Tensor:
    """Product of `x` with some rows of a linear layer."""
    if type(layer) is nn.Linear:
        return F.linear(x, layer.weight[rows])
    packed, scales, biases, _ = layer.weights()
    weight = packed[rows], scales[rows], None if biases is None else biases[rows]
    compute = partial(ops.linear_quantized, x, *weight, format=layer.format.name)
    return with_decoded_weights(compute, layer, packed, scales, biases) if x.is_cpu else compute()


def _operator_for(layer: Any) -> str | None:
    """Operator that multiplies by the heads' matrices of a layer; None where its eager code must run."""
    operator = {nn.Linear: "_heads_mm", QuantizedLinear: "_heads_quantized"}.get(type(layer))
    is_plain = operator is not None and layer.bias is None and not is_observed(layer)
    return operator if is_plain else None


def use_latents(module: nn.Module) -> list[Done]:
    """Lets an attention layer that runs on `cached_attention`, and expands latents, attend to these.

    Returns: the report's addition; nothing for other layers.
    """
    expansion = expansion_of(module)
    operator = None if expansion is None else _operator_for(getattr(module, expansion.projection))
    if operator is None:
        return []
    done = [Done(operator, f"latents ({operator})", only_on_mps=True)]
    done.append(Done("_cached_attention", only_on_mps=True))
    if refusal(module, done) is not None:
        return []
    state_of(module).expansion = expansion
    return done


def expansion_of(module: nn.Module) -> Expansion | None:
    """Form of a module's method `expand_kv` for latents; None for any other or no method.

    It is tried with numbers in place of what its linear layer gives.
    """
    method, rotary = getattr(type(module), METHOD, None), getattr(module, "qk_rope_head_dim", None)
    if method is None or not isinstance(rotary, int):
        return None
    trial, generator = _Trial(module), torch.Generator().manual_seed(0)
    latents, rotated = (torch.rand(2, 1, 3, width, generator=generator) for width in (5, rotary))
    found = tried(inspect.unwrap(method), trial, latents, rotated)
    if not (isinstance(found, tuple) and len(found) == 2 and len(trial.calls) == 1):
        return None
    keys, values = found
    name, arguments, result = trial.calls[0]
    if arguments is not latents or keys.dim() != 4 or values.dim() != 4:
        return None
    heads, key_rows, value_rows = keys.shape[1], keys.shape[3] - rotary, values.shape[3]
    if key_rows < 0 or heads * (key_rows + value_rows) != result.shape[3]:
        return None
    rows = result.view(2, 3, heads, -1).transpose(1, 2)
    expected = torch.cat((rows[..., :key_rows], rotated.expand(-1, heads, -1, -1)), -1)
    if not (torch.equal(keys, expected) and torch.equal(values, rows[..., key_rows:])):
        return None
    return Expansion(name, heads, key_rows, value_rows)


class _Trial:
    """A module whose linear layers give random numbers, and which notes their calls."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.calls: list[tuple[str, Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return functools.partial(self._call, name, value) if isinstance(value, nn.Module) else value

    def _call(self, name: str, layer: Any, x: Tensor) -> Tensor:
        result = torch.rand(*x.shape[:-1], layer.out_features)
        self.calls.append((name, x, result))
        return result


def lazy_expand_kv(eager: Callable) -> Callable:
    """Method `expand_kv` of rewritten layers: gives LazyLatents where a layer attends to latents."""

    def expand_kv(self: nn.Module, latents: Tensor, rotated: Tensor) -> Any:
        form = self.__dict__.get(STATE, EMPTY_STATE).expansion
        runs = latents.is_mps or isinstance(latents, TiledStates)
        if form is None or not runs or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return eager(self, latents, rotated)
        source = Latents(self, eager, latents, rotated)
        keys = LazyLatents(source, 0, form.heads, form.key_rows + rotated.shape[3])
        return keys, LazyLatents(source, 1, form.heads, form.value_rows)

    return expand_kv
