"""Passes that are data: formulas, and the operators that compute them in one dispatch."""

import ast
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import fx

from .nodes import (
    aten,
    beneath,
    hoist,
    in_shape,
    is_call,
    is_final,
    is_node,
    is_same,
    is_unchanged,
    memory_of,
    name_of,
    ours,
    put,
    tensor_of,
    written,
)
from .patterns import Bound, Shared, before_widening, called, computed, leaves, matches, parsed
from .tracing import ITEM, VALUE, as_given, key_of


class _Unfit(ValueError):
    """An operator does not compute what a formula does."""


class Fusion:
    """A pass that puts operators in the place of formulas.

        Fusion("add_norms", ("R + rms_norm(X[S], W, EPS)", "fused_norm_add(R, X[S], W, EPS)"))

    A row applies where nothing else reads what lies inside of the formula, nobody can tell that the operator
    reads and writes when it does, its own checks take the arguments, and its result has the dtype and as many
    elements as the formula's: before a cast, if that is all that reads it. In the text of the operator, X[S]
    is X in this shape, before copies that only keep its values; an argument in a dtype that keeps all digits
    of the result's is taken before its cast; `*A` are the other arguments that are not defaults, which the
    operator may not name again. Further results are the values that the formula names with `:=`.

    Args:
        rows: (formula, operator), tried in this order.
        where: True if a row applies, from what its names stand for.
    """

    def __init__(self, name: str, *rows: tuple[str, str], where: Callable[..., bool] = lambda **_: True):
        self.__name__ = name
        self.rows, self.where = rows, where
        self._roots = {called(parsed(formula)) for formula, _ in rows}

    @property
    def introduced(self) -> str | None:
        """The operator that it puts in, where modules do not call it."""
        names = ((called(parsed(new)), formula) for formula, new in self.rows)
        return next((name for name, formula in names if name not in formula), None)

    def __call__(self, graph: fx.Graph) -> None:
        results: dict[Any, Any] = {}  # by call: the layers of a model have many equal ones
        for node in [*graph.nodes]:
            if node.users and name_of(node) in self._roots:
                self._run(node, results)

    def _run(self, node: fx.Node, results: dict[Any, Any]) -> None:
        for formula, new in self.rows:
            for match in matches(formula, node):
                ends = _ends(node) if self.where(**match) else ()
                if any(_fuse(node, end, match, parsed(new), results) for end in ends):
                    return


def _ends(root: fx.Node) -> Iterator[fx.Node]:
    """The cast that alone reads a value, and the value."""
    if len(root.users) == 1:
        (reader,) = root.users
        if is_call(reader, aten._to_copy) and is_final(reader):
            yield reader
    yield root


def _fuse(root: fx.Node, end: fx.Node, bound: Bound, new: ast.expr, results: dict[Any, Any]) -> bool:
    """Puts an operator in the place of a formula. Returns: whether it can."""
    inside = computed(root, leaves(bound))
    shared = [item.node for item in bound.values() if isinstance(item, Shared)]
    place = shared[0] if shared else end
    for node in inside:
        buffer = memory_of(node)
        is_read_inside = (
            node is root or buffer not in inside or buffer in shared or {*node.users} <= inside.keys()
        )
        if not is_read_inside or not _may_run_at(place, node, inside):
            return False
    try:
        _New(bound, place, tensor_of(end).dtype, results).replace(new, [end, *shared])
    except (ValueError, RuntimeError, TypeError):
        return False
    for node in sorted({*inside, end}, reverse=True):
        if not node.users:  # also those that write
            root.graph.erase_node(node)
    return True


def _may_run_at(place: fx.Node, node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """True if a call may run at a place: inputs are unchanged there, and writes unread."""
    read = (item for item in node.all_input_nodes if item not in inside)
    return all(is_same(item, node, place) for item in read) and all(
        is_same(item, node, place, read=False) for item in written(node)
    )


class _New:
    """Calls that take the place of a formula, in front of a node."""

    def __init__(self, bound: Bound, before: fx.Node, dtype: Any, results: dict[Any, Any]):
        self._found, self._before, self._dtype, self._results = bound, before, dtype, results

    def replace(self, form: ast.expr, old: list[fx.Node]) -> None:
        """Puts the operator of a formula in place of nodes.

        Raises: _Unfit if dtypes or sizes differ, or an argument is computed too late.
        """
        target, arguments, like = self._call(form)
        several = isinstance(like, (list, tuple))
        for one, other in zip(like if several else [like], map(tensor_of, old), strict=True):
            if one.dtype != other.dtype or one.numel() != other.numel() or not other.is_contiguous():
                raise _Unfit
        for item in filter(is_node, arguments.values()):
            if self._before < memory_of(item):
                raise _Unfit
            hoist(item, self._before)
        call = put(self._before, target, like, **arguments)
        for number, item in enumerate(old):
            result = put(self._before, ITEM, like[number], call, number) if several else call
            shaped: Any = in_shape(result, item, self._before)  # it is contiguous
            item.replace_all_uses_with(shaped)

    def _call(self, form: Any) -> tuple[Any, dict[str, Any], Any]:
        """An operator, its arguments, and its result."""
        target = getattr(ours, form.func.id).default
        passed: dict[str, Any] = {}
        known = {argument.name: argument for argument in target._schema.arguments}
        positional = [item for item in form.args if not isinstance(item, ast.Starred)]
        for star in form.args[len(positional) :]:
            passed |= self._found[star.value.id].arguments
        named = dict(zip(known, positional, strict=False)) | {
            keyword.arg: keyword.value for keyword in form.keywords
        }
        if passed.keys() & named.keys():
            raise _Unfit
        for name, item in named.items():
            value = self._value(item)
            passed[name] = float(value) if str(known[name].type) == "float" else value
        fakes = {n: tensor_of(v) if is_node(v) else as_given(v) for n, v in passed.items()}
        key = target, key_of([*fakes.items()])
        if key not in self._results:
            self._results[key] = target(**fakes)
        return target, passed, self._results[key]

    def _value(self, form: Any) -> Any:
        """The node or constant that a part of the form stands for; puts the calls in it into the graph."""
        if isinstance(form, ast.Name):
            value = self._found[form.id]
            return self._leaf(value, None) if isinstance(value, fx.Node) else value
        if isinstance(form, ast.Subscript):
            inner = form.value
            value = self._found[inner.id] if isinstance(inner, ast.Name) else self._value(inner)
            return self._leaf(value, self._shape(form.slice))
        if isinstance(form, ast.Constant):
            return form.value
        if form.func.id == "item":
            results, number = self._found[form.args[0].id], form.args[1].value
            return put(self._before, ITEM, results.meta[VALUE][number], results, number)
        target, arguments, like = self._call(form)
        return put(self._before, target, like, **arguments)

    def _shape(self, form: ast.expr) -> list[Any]:
        if isinstance(form, ast.Name):
            return [*self._found[form.id]]
        assert isinstance(form, ast.Tuple)
        sizes: list[Any] = []
        for elt in form.elts:
            size = self._found["..."] if ast.unparse(elt) == "..." else self._value(elt)
            sizes += size if isinstance(size, tuple) else [size]
        return sizes

    def _leaf(self, value: Any, shape: list[Any] | None) -> fx.Node:
        """A value in a shape, or its own; in the dtype of the result if it was in that before its cast."""
        if not isinstance(value, fx.Node):
            raise _Unfit
        if shape is None and tensor_of(value).dtype == self._dtype:
            return value
        sources = [value]
        while (source := self._source(sources[-1], shape is not None)) is not sources[-1]:
            sources.append(source)
        sources = [item for item in reversed(sources) if tensor_of(item).dtype == self._dtype] or [value]
        wanted = [*tensor_of(value).shape] if shape is None else shape
        as_wanted = (item for item in sources if [*tensor_of(item).shape] == wanted)
        shaped = (in_shape(item, wanted, self._before) for item in sources)
        result = next(as_wanted, None) or next(filter(None, shaped), None)
        if result is None:
            raise _Unfit
        return result

    def _source(self, value: fx.Node, copies: bool) -> fx.Node:
        """A value before it got its shape, was cast or copied; itself if it was not, or that has changed."""
        source: Any = beneath(value)
        if source is not value:
            return source
        is_copy = copies and is_call(value, aten.clone) and is_final(value)
        source = value.args[0] if is_copy else before_widening(value)
        is_same = source < self._before and is_unchanged(source, source, self._before)
        return source if is_same else value
