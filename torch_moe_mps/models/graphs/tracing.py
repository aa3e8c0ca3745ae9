"""Records the operators that a call of a model runs, as an FX graph, without computing anything.

Tensors are fake, numbers that change from token to token are symbols of a ShapeEnv, and whatever Python asks
of a symbol is a guard. make_fx does the same; here symbols stay in the arguments and no proxies
are made, which takes a third of its time.
"""

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, _refs, fx, nn
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from .fakes import FakeResults, geometry, listed

_ATEN = torch.ops.aten
_PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
TENSOR = "tensor"  # in the meta of a node: the constant that it stands for
PARTS = "parts"  # likewise: the parameters that are views of this constant
VALUE = "val"  # in the meta of a node: its fake result
_LEAST = 10_007  # beyond the sizes of weights, for numbers in place of symbols


class NotCapturable(Exception):
    """A call cannot be captured, and why."""


class LeftAlone(NotCapturable):
    """Raised for a call whose kind is never captured, which costs calls of other kinds nothing."""


class Number:
    """A number in the arguments of a node that differs from call to call."""

    def __init__(self, value: torch.SymInt) -> None:
        self.value = value

    @property
    def expression(self) -> Any:
        """The number as sympy has it."""
        return self.value.node.expr

    def __repr__(self) -> str:
        return str(self.expression)


def as_recorded(value: Any) -> Any:
    """A number as the arguments of nodes have it."""
    return Number(value) if isinstance(value, torch.SymInt) else value


def as_given(value: Any) -> Any:
    """The inverse of `as_recorded`."""
    return value.value if isinstance(value, Number) else value


def _has_symbols(numbers: Iterable[Any]) -> bool:
    return any(isinstance(number, torch.SymInt) for number in numbers)


def sampled(value: Any) -> Any:
    """Numbers, given or recorded, with some large one in place of each symbol: views that fit it fit all."""
    if isinstance(value, (list, tuple)):
        return [*map(sampled, value)]
    value = as_given(value)
    if not isinstance(value, torch.SymInt):
        return value
    expression = value.node.expr
    some = {symbol: _LEAST + zlib.crc32(symbol.name.encode()) % _LEAST for symbol in expression.free_symbols}
    return int(expression.subs(some))


class _Named(Source):
    """Source of a symbol, for the ShapeEnv."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_own_name", name)

    @property
    def name(self) -> str:
        return self.__dict__["_own_name"]


class _Symbols(ShapeEnv):
    """Does not look for the line of code that a guard comes from: torch imports its compiler for that."""

    _compares_symbols = False

    def _get_user_frame(self) -> None:
        return None

    @contextlib.contextmanager
    def comparing_symbols(self) -> Iterator[None]:
        """Inside, two sizes are equal only if they are in every call, so that comparing them is no guard.

        Eight rows are then something else than eight experts.
        """
        self._compares_symbols = True
        try:
            yield
        finally:
            self._compares_symbols = False

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if self._compares_symbols and isinstance(orig_expr, (sympy.Eq, sympy.Ne)):
            known = self._maybe_evaluate_static(orig_expr)
            return sympy.S(isinstance(orig_expr, sympy.Ne)) if known is None else known
        return super().evaluate_expr(orig_expr, *args, **kwargs)


@contextlib.contextmanager
def symbols_end() -> Iterator[None]:
    """Lets the symbols of recorders go at the end of the block: caches of torch hold all that they saw."""
    try:
        yield
    finally:
        for method in vars(ShapeEnv).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


class Recorder(TorchDispatchMode):
    """Records into `graph` what runs inside its block.

    Args:
        look_at: is shown the calls of Python in `run` outside of operators, as `sys.setprofile` shows them.

    Attributes:
        graph: placeholders are inputs; nodes of get_attr are constants.
        symbols: {sympy symbol: its value at the capture}, in the order of `symbol`.
    """

    def __init__(self, look_at: Callable[[FrameType, str, Any], None] | None = None) -> None:
        super().__init__()
        self._look_at = look_at
        self.graph = fx.Graph()
        self.env = _Symbols(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.symbols: dict[Any, int] = {}
        self._nodes: dict[int, fx.Node] = {}  # {id of a tensor: node}
        self._fake_of: dict[int, FakeTensor] = {}  # {id of a constant: its fake}
        self._alive: list[Any] = []
        self.fakes = FakeResults(self.env, self._nodes)

    def symbol(self, value: int, least: int) -> torch.SymInt:
        """A number that is `value` now and at least `least` in every call."""
        name = _Named(f"n{len(self.symbols)}")
        symbol = self.env.create_symbol(
            value, name, DimDynamic.DYNAMIC, positive=least > 0 or None, do_not_specialize_zero_one=least < 2
        )
        self.symbols[symbol] = value
        number: Any = self.env.create_symintnode(symbol, hint=value)
        return number

    def input(self, like: Tensor, sizes: tuple[Any, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A fake tensor of these sizes that the calls get; of another dtype if nothing may read it."""
        fake = self.fakes.empty(like, sizes, dtype)
        node = self.graph.placeholder(f"input_{len(self._nodes)}")
        self._name(fake, node)
        return fake

    @torch.compiler.disable
    def run(self, function: Callable[[], Any]) -> Any:
        # In these modes torch's compiler would give up what it compiles, and not for this call alone.
        with torch.compiler.set_stance("force_eager"), self.fakes.mode, self:
            if self._look_at is None:
                return function()
            before = sys.getprofile()
            sys.setprofile(self._look_at)
            try:
                return function()
            finally:
                sys.setprofile(before)

    def finish(self, results: list[Tensor]) -> None:
        """Ends the graph, which returns these tensors."""
        self.graph.output([self.node_of(tensor) for tensor in results])
        self._alive, self._nodes, self._fake_of = [], {}, {}
        self.fakes.end()

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that makes a tensor; a constant for tensors from outside the recording."""
        node = self._nodes.get(id(tensor))
        if node is None:
            if isinstance(tensor, FakeTensor):
                raise NotCapturable("a tensor of an earlier trace is used again")
            with self.graph.inserting_before():  # in front, where every call can read it
                node = self.graph.get_attr(f"constant_{len(self._nodes)}")
            node.meta[TENSOR] = tensor
            self._name(tensor, node)
        return node

    def _name(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta[VALUE] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def is_read(self, fake: Tensor) -> bool:
        return bool(self._nodes[id(fake)].users)

    def _fake(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            fake = self._fake_of.get(id(value))
            if fake is None:
                self.node_of(value)
                fake = self._fake_of[id(value)] = self.fakes.empty(value, value.shape)
                self._nodes[id(fake)] = self._nodes[id(value)]
            return fake
        if isinstance(value, (list, tuple)):
            return [self._fake(item) for item in value]
        return value

    def _recorded(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return [self._recorded(item) for item in value]
        return as_recorded(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented
        if self._look_at is None or sys.getprofile() is not self._look_at:
            return self._dispatch(func, args, kwargs or {})
        sys.setprofile(None)  # most of what runs does so in operators, and is torch's
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            sys.setprofile(self._look_at)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _ATEN.lift_fresh.default:  # a new tensor, which may be written
            func = _ATEN.clone.default
        if func is _ATEN.constant_pad_nd.default and _has_symbols((*args[0].shape, *args[1])):
            with self:  # its kernel takes no symbols
                return _refs.constant_pad_nd(*args, **kwargs)
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator, whose call is a node unless it only gives a number."""
        args = [self._fake(value) for value in args]
        kwargs = {name: self._fake(value) for name, value in kwargs.items()}
        result = self.fakes.of(func, args, kwargs)
        results = listed(result)
        if not any(isinstance(one, Tensor) for one in results) and not func._schema.is_mutable:
            return result  # a number, which is known
        node = self.graph.call_function(
            func, tuple(map(self._recorded, args)), {name: self._recorded(v) for name, v in kwargs.items()}
        )
        node.meta[VALUE] = result
        for number, item in enumerate(results):
            if isinstance(item, Tensor) and id(item) not in self._nodes:
                of_list = isinstance(result, (list, tuple))
                producer = self.graph.call_function(_item, (node, number)) if of_list else node
                self._name(item, producer)
        return result


def key_of(value: Any) -> Any:
    """Key of an argument, given or recorded: hashable, and equal where operators see no difference."""
    value = as_given(value)
    if isinstance(value, Tensor):
        return value.dtype, value.device, *map(key_of, geometry(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(key_of, value))
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        value = int(expression) if expression.is_number else expression
    return type(value), value  # sympy compares its expressions with no tuple


def _item(results: Any, number: int) -> Any:
    return results[number]


ITEM = _item


def is_operator(node: fx.Node) -> bool:
    """True if a node calls an operator; others are inputs, constants and results of several."""
    return node.op == "call_function" and node.target is not ITEM
