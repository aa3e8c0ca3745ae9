"""Experts in nvfp4 with a further global scale for each matrix of an expert, as MLX can write them.

A weight is code * scale of its group * global scale / (448 * 6). The scale of a group has too few bits to
absorb the global scale, so results are multiplied by it, in float32.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..quantization import Format
from .interface import Experts, projections

ops = torch.ops.moe_mps

LARGEST = 448.0 * 6.0  # the largest scale of a group times the largest code


def global_scale_of(projection: str) -> str:
    """The name of a parameter [E, 1], or [E, 2] for gate and up, float32."""
    return f"{projection}_global_scale"


def global_scales_of(experts: nn.Module) -> list[str]:
    """The projections of an experts module that have global scales."""
    return [p for p in projections(experts) if global_scale_of(p) in experts._parameters]


def register(model: nn.Module, names: Collection[str]) -> None:
    """Adds uninitialised global scales to the projections `names` of a model, to load a checkpoint."""
    for name in names:
        owner, _, projection = name.rpartition(".")
        module = model.get_submodule(owner)
        packed = getattr(module, f"{projection}_packed")
        parts = 2 if projection == "gate_up_proj" else 1
        empty = torch.empty(packed.shape[0], parts, dtype=torch.float32, device=packed.device)
        module.register_parameter(global_scale_of(projection), nn.Parameter(empty, requires_grad=False))


def expert_qmm(
    self: Experts, projection: str, x: Tensor, weight: tuple, ids: Tensor, form: Format, bias: Tensor | None
) -> Tensor:
    """The operator of the same name, applied with global scales if the module has them.

    The results stay in float32 until they are scaled, because unscaled values may exceed float16.
    """
    scale = self._parameters.get(global_scale_of(projection))
    if scale is None:
        return ops.expert_qmm(x, *weight, ids, form.name, bias)
    rows = ops.expert_qmm(x.float(), *weight, ids, form.name)
    known = ids.clamp(0, scale.shape[0] - 1).long()
    factor = (scale.float() / LARGEST)[known]
    if not self.is_concatenated:
        rows = (rows.unflatten(-1, (-1, scale.shape[1])) * factor.unsqueeze(-2)).flatten(-2)
    else:
        rows = (rows.unflatten(-1, (scale.shape[1], -1)) * factor.unsqueeze(-1)).flatten(-2)
    if bias is not None:
        rows = rows + bias[known] * (known == ids).unsqueeze(-1)
    return rows.to(x.dtype)
