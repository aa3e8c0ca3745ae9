"""The decode step of linear attention with the gated delta rule (Qwen3-Next).

These forwards branch between a prompt and one token, so they are not straight-line programs. Only the calls
of the two functions of the decode step are rewritten. Those functions, and the gates before them, are
recognised by running them on random numbers.
"""

import ast
import copy
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ....ops.gated_delta import MAX_KEY_WIDTH
from ..program.building import helper
from ..program.programs import compile_forward, original_class
from ..runtime import called
from .linear import join_in_body
from .ordering import order_in_body
from .trial import agrees

ops = torch.ops.moe_mps

MOST_TOKENS = 8
_L2NORM_EPS = 1e-6
_FLAG = (bool, type(None))
_ACTIVATIONS = {"silu": "silu", "swish": "silu", None: "none"}


# What the rewritten forwards call


@called
def causal_conv(
    function: Callable,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """function(x, conv_state, weight, bias, activation), which updates conv_state in place."""
    name = _ACTIVATIONS.get(activation)
    present = [tensor for tensor in (x, conv_state, weight, bias) if tensor is not None]
    known = all(tensor.dtype in ACTIVATION_DTYPES and tensor.device == x.device for tensor in present)
    fits = known and x.shape[-1] <= MOST_TOKENS and conv_state.shape[-1] >= weight.shape[-1] - 1
    if name is None or not fits:
        return function(x, conv_state, weight, bias, activation)
    return ops.causal_conv1d_update_(x, conv_state, weight, bias, name)


@called
def delta_rule(
    function: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Callable,
    raw: tuple | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """function(q, k, v, g=, beta=, **options), and the state, which is updated in place.

    `gates` computes g and beta; `raw` is what the operator takes in their place: g, beta, A_log, dt_bias.
    """
    state, normed, final, others = _split(options)
    if not final or others or not _fits(q, k, v, state):
        g, beta = gates()
        return function(q, k, v, g=g, beta=beta, **options)
    eps = _L2NORM_EPS if normed else None
    scale = q.shape[-1] ** -0.5
    if raw is None:
        g, beta = gates()
        out = ops.gated_delta_rule_(q, k, v, g, beta, state, scale, l2norm_eps=eps)
    else:
        g, beta, A_log, dt_bias = raw
        heads = {"A_log": A_log, "dt_bias": dt_bias, "beta_is_logit": True}
        out = ops.gated_delta_rule_(q, k, v, g, beta, state, scale, l2norm_eps=eps, **heads)
    return out, state


def _split(options: dict) -> tuple:
    """initial_state, use_qk_l2norm_in_kernel, output_final_state, and the names of other options in use.

    Flags of the model, such as use_cache, are no options: forwards pass them on to every function.
    """
    names = ("initial_state", "use_qk_l2norm_in_kernel", "output_final_state")
    others = [name for name, value in options.items() if not (name in names or isinstance(value, _FLAG))]
    return *(options.get(name) for name in names), others


def _fits(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    if state is None or state.dtype != torch.float32 or state.device != q.device:
        return False
    dtypes = q.dtype in ACTIVATION_DTYPES and q.dtype == k.dtype == v.dtype
    few = q.dim() == 4 and q.shape[1] <= MOST_TOKENS and q.shape[-1] <= MAX_KEY_WIDTH
    return dtypes and few and q.shape == k.shape and v.shape[2] % q.shape[2] == 0


# Recognising functions by running them


@functools.cache
def is_causal_conv(function: Callable) -> bool:
    """Whether a function of (x, conv_state, weight, bias, activation) is causal_conv1d_update_."""
    generator = torch.Generator().manual_seed(0)
    x, state, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((2, 3, 1), (2, 3, 4), (3, 4), (3,))
    )
    for given, activation in ((None, "silu"), (bias, None)):
        theirs, ours = state.clone(), state.clone()
        try:
            with torch.no_grad():
                result = function(x, theirs, weight, given, activation)
        except Exception:  # of a function that is not ours, on arguments that it may not know
            return False
        expected = ops.causal_conv1d_update_(x, ours, weight, given, _ACTIVATIONS[activation])
        if not _agree(result, expected) or not torch.equal(theirs, ours):
            return False
    return True


@functools.cache
def is_delta_rule(function: Callable) -> bool:
    """Whether a function of (q, k, v, g, beta, ...) is gated_delta_rule_."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 2, 8), (2, 2, 2, 8), (2, 2, 4, 3), (2, 2, 4), (2, 2, 4), (2, 4, 8, 3))
    q, k, v, g, beta, state = (torch.randn(shape, generator=generator) for shape in shapes)
    k, g, beta = F.normalize(k, dim=-1), -g.abs(), beta.sigmoid()
    for normed in (True, False):
        ours = state.clone()
        options = {"initial_state": state.clone(), "output_final_state": True}
        try:
            with torch.no_grad():
                result = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normed, **options)
        except Exception:  # of a function that is not ours, on arguments that it may not know
            return False
        eps = _L2NORM_EPS if normed else None
        expected = ops.gated_delta_rule_(q, k, v, g, beta, ours, 8**-0.5, l2norm_eps=eps)
        if not isinstance(result, tuple) or not all(map(_agree, result, (expected, ours))):
            return False
    return True


_agree = functools.partial(agrees, rtol=1e-4)


class _Gate:
    """A statement `name = expression` of one local value and attributes of the module."""

    def __init__(self, statement: ast.Assign, scope: dict):
        self.statement = statement
        self.scope = scope
        nodes = list(ast.walk(statement.value))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.locals = sorted(names - {"self"} - scope.keys())
        self.attributes = sorted(
            {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
        )

    def tried(self, value: Tensor, attributes: dict[str, Tensor]) -> object:
        """What the expression gives for these values."""
        code = compile(ast.Expression(self.statement.value), "<gate>", "eval")
        try:
            values = {"self": types.SimpleNamespace(**attributes), self.locals[0]: value}
            return eval(code, self.scope, values)
        except Exception:
            return None


def _is_sigmoid(gate: _Gate) -> bool:
    if len(gate.locals) != 1 or gate.attributes:
        return False
    b = torch.linspace(-4.0, 4.0, 7)
    return _agree(gate.tried(b, {}), b.sigmoid())


def _decay_attributes(gate: _Gate) -> tuple[str, str] | None:
    """The names of A_log and dt_bias in -exp(A_log) * softplus(a + dt_bias)."""
    if len(gate.locals) != 1 or len(gate.attributes) != 2:
        return None
    a, A_log, dt_bias = (
        torch.linspace(-4.0, 4.0, 7),
        torch.linspace(-1.0, 1.0, 7),
        torch.linspace(0.0, 3.0, 7),
    )
    expected = -A_log.exp() * F.softplus(a + dt_bias)
    first, second = gate.attributes
    for names in ((first, second), (second, first)):
        if _agree(gate.tried(a, dict(zip(names, (A_log, dt_bias), strict=True))), expected):
            return names
    return None


# Rewriting of a forward


def rewrite_gated_delta(module: nn.Module) -> tuple[Callable, str] | None:
    """(forward, what it runs) for a layer with linear attention, else None."""
    own = original_class(module).forward
    inner = inspect.unwrap(own)
    if not isinstance(inner, types.FunctionType) or inner.__closure__:
        return None
    names = set(inner.__code__.co_names)
    if not any("conv1d" in name or "delta_rule" in name for name in names):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    rewriter = _Rewriter(inner.__globals__, tree)
    tree = rewriter.visit_FunctionDef(tree)
    if not rewriter.rewrites:
        return None
    if ordered := order_in_body(module, tree.body, inner):
        rewriter.rewrites.update(ordered)
    elif joined := join_in_body(module, tree.body):
        rewriter.rewrites.add(f"linear_quantized ({', '.join(joined)})")
    tree = ast.fix_missing_locations(tree)
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.name, tree.returns = "forward", None
    return compile_forward(inner, tree), "; ".join(sorted(rewriter.rewrites))


class _Rewriter(ast.NodeTransformer):
    def __init__(self, scope: dict, tree: ast.FunctionDef):
        self.scope = scope
        self.tree = tree
        self.rewrites: set[str] = set()

    def function(self, call: ast.Call) -> Callable | None:
        return self.scope.get(call.func.id) if isinstance(call.func, ast.Name) else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self.statements(node.body)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = self.function(node)
        plain = 3 <= len(node.args) <= 5 and not node.keywords
        if (
            function is None
            or not plain
            or "conv" not in ast.unparse(node.func)
            or not is_causal_conv(function)
        ):
            return node
        self.rewrites.add("causal_conv1d_update_")
        return helper("causal_conv", node.func, *node.args)

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The rewritten statements of the forward; gates move to the branches that use them."""
        body = [self.visit(statement) for statement in body]
        for branch in body:
            call = self.step(branch) if isinstance(branch, ast.If) else None
            if call is None or not isinstance(branch, ast.If):
                continue
            gates = [self.gate(body, branch, call, name) for name in ("g", "beta")]
            raw = self.raw(*gates)
            self.rewrite_step(call, raw)
            if raw is not None:
                moved = [gate.statement for gate in gates if gate is not None]
                first = sorted(moved, key=body.index)
                body = [statement for statement in body if statement not in moved]
                branch.orelse = [*first, *branch.orelse]
        return body

    def step(self, branch: ast.If) -> ast.Call | None:
        """The call of the recurrence in a branch of an `if`; the cache takes the state back."""
        if len(branch.body) != 1 or not branch.orelse or not isinstance(assign := branch.body[0], ast.Assign):
            return None
        call, target = assign.value, assign.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not isinstance(call, ast.Call):
            return None
        function = self.function(call)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if len(call.args) != 3 or not {"g", "beta", "initial_state"} <= keywords.keys():
            return None
        if function is None or not self.returns_state(ast.unparse(target.elts[1])):
            return None
        return call if is_delta_rule(function) else None

    def returns_state(self, name: str) -> bool:
        """Whether the cache is given the state that the step returns: in place is then the same."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        updates = [c for c in calls if ast.unparse(c.func).endswith(".update_recurrent_state")]
        return any(call.args and ast.unparse(call.args[0]) == name for call in updates)

    def gate(self, body: list[ast.stmt], branch: ast.If, call: ast.Call, keyword: str) -> _Gate | None:
        """The statement that computes a gate, if nothing but the two branches reads it."""
        value = next(k.value for k in call.keywords if k.arg == keyword)
        if not isinstance(value, ast.Name):
            return None
        defined = [s for s in body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == value.id]
        inside = {id(node) for node in ast.walk(branch)}
        reads = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == value.id]
        elsewhere = [n for n in reads if isinstance(n.ctx, ast.Load) and id(n) not in inside]
        if len(defined) != 1 or len(defined[0].targets) != 1 or elsewhere:
            return None
        return _Gate(defined[0], self.scope)

    def raw(self, g: _Gate | None, beta: _Gate | None) -> list[ast.expr] | None:
        """g, beta, A_log and dt_bias as the operator takes them."""
        if g is None or beta is None:
            return None
        names = _decay_attributes(g)
        if names is None or not _is_sigmoid(beta):
            return None
        attributes = [ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()) for name in names]
        return [*(ast.Name(gate.locals[0], ast.Load()) for gate in (g, beta)), *attributes]

    def rewrite_step(self, call: ast.Call, raw: list[ast.expr] | None) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        rest = [keyword for keyword in call.keywords if keyword.arg not in ("g", "beta")]
        values = [given["g"], given["beta"]]
        if raw is not None:
            values = [copy.deepcopy(self.definition(ast.unparse(value))) for value in values]
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        gates = ast.Lambda(empty, ast.Tuple(values, ast.Load()))
        packed = ast.Constant(None) if raw is None else ast.Tuple(raw, ast.Load())
        new = helper("delta_rule", call.func, *call.args, gates=gates, raw=packed)
        call.func, call.args, call.keywords = new.func, new.args, [*new.keywords, *rest]
        self.rewrites.add("gated_delta_rule_")

    def definition(self, name: str) -> ast.expr:
        assigns = (node for node in ast.walk(self.tree) if isinstance(node, ast.Assign))
        return next(a.value for a in assigns if ast.unparse(a.targets[0]) == name)
