"""Rules that are rows: formulas of what a module computes, and the operators that compute it."""

import functools
import warnings
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...._text import first_line
from ...basics.state import NOTHING, STATE, state_of
from ..recognise import Call, Rows, weights_of
from ..traced import SIZES, Input, trace

NormArguments: TypeAlias = tuple[Any, float, float]  # weight, eps and offset of a norm in an operator

_MEANS = ("mean(pow(X, 2), [-1], True)", "mean(X * X, [-1], True)")
_ROOTS = ("Y * rsqrt({} + EPS)", "Y * pow({} + EPS, -0.5)", "Y / sqrt({} + EPS)")
# Formula of an RMSNorm -> the arguments of its operator behind the inputs.
_NORMS = {
    form.format(root.format(mean)): arguments
    for form, arguments in (
        ("(W + 1.0) * ({})", "W, EPS, 1.0"),
        ("W * ({})", "W, EPS, 0.0"),
        ("{}", "None, EPS, 0.0"),
    )
    for root in _ROOTS
    for mean in _MEANS
}
_WIDEST_OF_HEADS = 1024

rms_norm = Rows("rms_norm", ("X Y",), [(norm, f"rms_norm(X, {own})") for norm, own in _NORMS.items()])
gated_norm = Rows(
    "gated_norm",
    ("X Y", "GATE"),
    [(f"({norm}) * silu(GATE)", f"rms_norm_gated(X, GATE, {own})") for norm, own in _NORMS.items()],
    widest=_WIDEST_OF_HEADS,
)

_CENTRED = "(Y - mean(Y, [-1], True))"
_NORMALISED = [root.replace("Y", _CENTRED).format(f"mean(pow({_CENTRED}, 2), [-1], True)") for root in _ROOTS]
_LAYER_NORMS = {
    "item(native_layer_norm(Y, SHAPE, W + 1.0, B, EPS), 0)": "W, B, EPS, 1.0",
    "item(native_layer_norm(Y, SHAPE, W, B, EPS), 0)": "W, B, EPS, 0.0",
    **{
        form.format(normalised): arguments
        for form, arguments in (
            ("(W + 1.0) * ({}) + B", "W, B, EPS, 1.0"),
            ("W * ({}) + B", "W, B, EPS, 0.0"),
            ("(W + 1.0) * ({})", "W, None, EPS, 1.0"),
            ("W * ({})", "W, None, EPS, 0.0"),
            ("{}", "None, None, EPS, 0.0"),
        )
        for normalised in _NORMALISED
    },
}
# LayerNorms that a model computes step by step or with casts.
layer_norm = Rows(
    "layer_norm", ("X Y",), [(norm, f"layer_norm(X, {own})") for norm, own in _LAYER_NORMS.items()]
)


def is_norm(module: nn.Module, weighted: bool | None = None) -> bool:
    """True if a module is an RMSNorm of whole rows, with a weight, without (False) or either (None).

    Its state has the call from then on. A forward that is rewritten meanwhile rests on it.
    """
    call = rms_norm.call_of(module)
    if call is None or call.groups > 1 or weighted not in (None, bool(call.weights)):
        return False
    state_of(module).formula = call
    return True


def norm_arguments(norm: nn.Module, x: Tensor) -> NormArguments | None:
    """The weight, None without one, eps and weight_offset; None where only the eager forward norms x."""
    call: Call | None = norm.__dict__.get(STATE, NOTHING).formula
    weights = None if call is None or call.groups > 1 else weights_of(norm, call, (x,))
    return None if call is None or weights is None else (*weights, *call.constants)


class _Usual(nn.Module):
    """A norm as most models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@functools.cache
def check_traces() -> None:
    """Warns, once, where traces show no formula: in another torch every module would run unmodified."""
    try:
        traced = trace(_Usual(), Input((*SIZES[0], 8)), raises=True)
        if traced is not None and rms_norm.read(traced, ("x",)) is not None:
            return
        nodes = () if traced is None else traced.graph.nodes
        reason = f"a norm gives [{', '.join(str(node.target) for node in nodes)}]"
    except Exception as error:  # another torch may raise it in any of its functions
        reason = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(
        f"torch_moe_mps: torch {torch.__version__} does not show what modules compute ({reason}); norms, "
        "MLPs and routers keep the model's own code",
        stacklevel=2,
    )
