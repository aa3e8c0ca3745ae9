"""LayerNorms that a model computes step by step or with casts: one operator each, as torch's own is."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ...basics.reads import depends_on
from ...basics.report import Done
from ...basics.state import STATE, original_class, state_of
from .trial import agrees, tried, twin_of, verdict

ops = torch.ops.moe_mps

_EPS = ("variance_epsilon", "eps")  # attributes
_DEFAULT_EPS = 1e-5  # where a module has none


class LayerNormForm(NamedTuple):
    """(weight + offset) * layer_norm(x) + bias of rows of `width`.

    `eps`: the attribute, empty where it is _DEFAULT_EPS. `keeps_dtype`: the result has the dtype of x,
    whatever the weight has.
    """

    width: int
    eps: str
    offset: float
    keeps_dtype: bool


def layer_norm_forward(norm: nn.Module, x: Tensor) -> Tensor:
    """The forward of a rewritten norm."""
    form: LayerNormForm = norm.__dict__[STATE].formula
    weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))
    same = form.keeps_dtype or weight is None or weight.dtype is x.dtype
    if not same or x.dtype not in ACTIVATION_DTYPES or x.shape[-1] != form.width:
        return original_class(norm).forward(norm, x)
    eps = getattr(norm, form.eps) if form.eps else _DEFAULT_EPS
    return ops.layer_norm(x, weight, bias, eps, form.offset)


def rewrite_layer_norm(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a LayerNorm of a model, else None."""
    given = {name: value for name, value in module._parameters.items() if value is not None}
    shape: tuple[int, ...] = getattr(module, "normalized_shape", ())
    shape = given["weight"].shape if "weight" in given else shape
    if module._modules or module._buffers or not given.keys() <= {"weight", "bias"} or len(shape) != 1:
        return None
    eps = next((name for name in _EPS if isinstance(getattr(module, name, None), float)), "")
    offsets = (0.0, 1.0) if "weight" in given else (0.0,)
    forms = [LayerNormForm(shape[0], eps, offset, False) for offset in offsets]
    tries = (verdict(module, _same, form) for form in forms)
    form = next((form for form in tries if form is not None), None)
    if form is None:
        return None
    for name in ("weight", "bias"):
        depends_on(module, name)
    state_of(module).formula = form
    return layer_norm_forward, [Done("layer_norm")]


def _same(module: nn.Module, form: LayerNormForm) -> LayerNormForm | None:
    """The form, if it gives what the module's own forward gives: of large rows and of small ones, for eps."""
    twin = twin_of(module)
    x = torch.randn(2, form.width) * torch.tensor([[3.0], [1e-3]]) + 0.01
    state_of(twin).formula = form
    own = original_class(module).forward
    if not agrees(layer_norm_forward(twin, x), own(twin, x)):
        return None
    mixed = tried(own, twin, x.bfloat16())
    return form._replace(keeps_dtype=isinstance(mixed, Tensor) and mixed.dtype == torch.bfloat16)
