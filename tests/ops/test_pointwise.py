"""pointwise against the float64 oracle."""

import pytest
import torch
from support.oracles_operators import checked
from support.values import EACH_DTYPE, numbers

from torch_moe_mps.ops.families.pointwise import BINARY, OPERATIONS, _pointwise

WIDE = "sigmoid a bf16; mul %0 b f32; add %1 c f16; max %2 1e-3 f32; mul %3 %3 f32"


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(device, operation, dtype):
    x, y = (numbers(3, 130, seed=seed, dtype=dtype).to(device) * 3 for seed in (0, 1))
    for formula in (f"{operation} a{' b' if operation in BINARY else ''} {to}" for to in ("f32", "bf16")):
        checked("_pointwise", x, formula, "float32", y)


def test_shapes_strides_and_dtypes(device):
    """Elements of one threadgroup, of several, none; what is broadcast, transposed, and starts anywhere."""
    for shape in ((), (1,), (64,), (65,), (2, 3, 4, 5), (1, 1, 300), (3, 0, 2)):
        rows = numbers(*shape, dtype=torch.bfloat16).to(device)
        checked("_pointwise", rows, WIDE, "float16", rows.float(), numbers(*shape[-1:]).to(device))
    x, memory = numbers(2, 5, 4).to(device), numbers(4, 11, 5).to(device)
    c = memory[:, 3:5].permute(1, 2, 0)
    checked("_pointwise", x, WIDE, "bfloat16", memory[0, 7, :, None], c)
    checked("_pointwise", x[:, :1], WIDE, "float32", x.mT.contiguous().mT, c.half())
    long = torch.arange(20, device=device).view(5, 4)
    checked("_pointwise", long, "add a 1 f32; log %0 f32; mul %1 f f32", "float32", f=long.int().flip(0))


@pytest.mark.parametrize("function", [torch.cos, torch.sin])
def test_angles_of_positions(device, function):
    """From 0 to those that float32 cannot represent, and negative ones, as tables of rotations have them."""
    positions = torch.tensor([[0, 1, 2, 4095, 131071, 999999, 10**6, 2**24 + 1, 2**31 - 1, -1, -77]])
    rates = 10000.0 ** -(torch.arange(32) / 32)
    formula = f"mul a b f32; {function.__name__} %0 f32"
    found = _pointwise(positions.to(device).unsqueeze(-1), formula, "float32", rates.to(device))
    angles = positions.unsqueeze(-1).float() * rates
    torch.testing.assert_close(found.cpu(), function(angles.double()).float(), rtol=0, atol=5e-7)


def test_the_mean_of_streams(device):
    for shape in ((4, 70), (3, 1, 2, 33), (2, 300, 1), (2, 4, 0)):
        x = numbers(*shape, dtype=torch.bfloat16).to(device)
        checked("_pointwise", x, WIDE, "float16", x[..., :1, :].float(), x[..., :1], mean=True)


def test_values_without_a_number(device):
    """Infinities and NaN go through as aten has them."""
    inf, nan = torch.inf, torch.nan
    values = torch.tensor([inf, -inf, nan, 0.0, -0.0, 100.0, -100.0, 1e-30, -3.0, 3e38]).to(device)
    for operation in OPERATIONS:
        binary = operation in BINARY
        inputs = (values[:, None], values) if binary else (values,)
        found = _pointwise(inputs[0], f"{operation} a{' b' if binary else ''} f32", "float32", *inputs[1:])
        name = {"max": "maximum", "min": "minimum", "to": "clone"}.get(operation, operation)
        place = torch.nn.functional if operation in ("silu", "softplus") else torch
        expected = getattr(place, name)(*(each.cpu() for each in inputs))
        assert torch.allclose(found.cpu(), expected, 1e-5, 1e-37, equal_nan=True), operation


def test_every_step_and_input(device):
    """As many steps, numbers and inputs as there may be; all of them count."""
    inputs = [numbers(70, seed=seed).to(device) for seed in range(6)]
    steps = ["add a b f32", "add %0 c f32", "add %1 d f32", "add %2 e f32", "add %3 f f32"]
    steps += [f"add %{n} {n - 3.5} f32" for n in range(4, 16)]
    steps += [f"mul %{n} 0.5 f32" for n in range(16, 31)]
    assert len(steps) == 32
    checked("_pointwise", inputs[0], "; ".join(steps), "float32", *inputs[1:])
