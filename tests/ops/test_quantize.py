"""_quantize_by_importance on the device, beside its reference and its oracle."""

import itertools

import numpy as np
import pytest
import torch
from support.ops.quantize import group_sums, weighted_errors
from support.oracles_experts import numbers_of
from support.oracles_operators import checked
from support.quantized_layers import WEIGHED
from support.values import DTYPES, awkward_weights

from torch_moe_mps.ops.families.quantize import _quantize_by_importance


def given(dtype, experts=3, columns=256):
    """Importance over some orders of magnitude, of some groups zero, and about 1."""
    importance = torch.randn(experts, columns, generator=torch.Generator().manual_seed(1)).exp().square()
    importance[1, :128] = 0
    return awkward_weights(dtype), importance / importance.mean(-1, keepdim=True)


@pytest.mark.on("mps")
@pytest.mark.parametrize(("format", "dtype"), [*zip(WEIGHED, itertools.cycle(DTYPES))], ids=str)
def test_as_good_as_the_reference(device, format, dtype):
    """Sums in another order decide otherwise where two scales are equally good."""
    weight, importance = given(dtype)
    ours = checked("_quantize_by_importance", weight.to(device), importance.to(device), format)
    ours, theirs = [x.cpu() for x in ours], _quantize_by_importance(weight, importance, format)
    assert (ours[0] == theirs[0]).float().mean() > 0.93
    size = group_sums(importance.double()[:, None].numpy() * weight.double().numpy() ** 2, format)
    with np.errstate(all="ignore"):
        errors = [weighted_errors(weight, found[:3], importance, format) for found in (ours, theirs)] / size
    ours, theirs = errors[:, np.isfinite(errors).all(0)].sum(-1)
    assert ours == pytest.approx(theirs, rel=1e-4 if numbers_of(format)[0] <= 5 else 1e-3)


def test_what_is_not_finite_stays_in_its_group(device):
    weight, importance = (tensor.to(device) for tensor in given(torch.float16))
    plain = _quantize_by_importance(weight, importance, "affine4_64")
    spoilt = weight.clone()
    spoilt[0, 3, 70], spoilt[2, 16, 255] = torch.nan, torch.inf
    found = _quantize_by_importance(spoilt, importance, "affine4_64")
    whole = torch.ones(3, 17, 256, dtype=torch.bool)
    whole[0, 3, 64:128] = whole[2, 16, 192:] = False
    for before, after in zip(plain, found, strict=True):
        kept = whole.view(3, 17, before.shape[2], -1).all(-1)
        assert torch.equal(after.cpu()[kept], before.cpu()[kept])
