"""Autograd: gradients are refused by name, and writing in place is seen."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._registry import WITH_BACKWARD
from torch_moe_mps.ops._samples import copies, packet, sample_arguments

NUMBERS_OF_TOKENS = ("moe_bucket", "moe_compute_ids_tpe", "_index_topk", "sample", "_sample_with_flags")
WITH_NUMBERS = [name for name in OPERATORS if name not in NUMBERS_OF_TOKENS]
# One tensor, several, with integers among them, none; backward declared for some arguments.
EACH_KIND = ("rms_norm", "rope", "moe_router", "_write_cache_quantized_", "expert_qmm")


def floating_arguments(name: str, device: str) -> tuple[dict, list[str]]:
    arguments = sample_arguments(name, device, torch.float32)
    mutated = {
        a.name for a in packet(name).default._schema.arguments if a.alias_info and a.alias_info.is_write
    }
    floating = [n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()]
    return arguments, [n for n in floating if n not in mutated]


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", EACH_KIND)
def test_backward_fails_by_name(device, name):
    """Whichever argument needs the gradient, backward raises instead of leaving it out."""
    arguments, floating = floating_arguments(name, device)
    declared = WITH_BACKWARD[name].reads if name in WITH_BACKWARD else {}  # of these test_gradients.py is
    for argument in set(floating) - set(declared):
        needy = copies(arguments)
        needy[argument] = needy[argument].requires_grad_()
        result = packet(name)(**needy)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        outputs += [value for written, value in needy.items() if written.endswith("_")]
        floats = [output for output in outputs if output.is_floating_point()]
        assert floats and all(output.requires_grad for output in floats)
        assert not any(output.requires_grad for output in outputs if not output.is_floating_point())
        for output in floats:
            with pytest.raises(RuntimeError, match=f"moe_mps::{name}.* not implemented") as error:
                output.sum().backward(retain_graph=True)
            assert error.type is RuntimeError


@pytest.mark.filterwarnings("ignore:Error detected in _NoBackward")
def test_compiled_backward_fails_by_name():
    """torch.compile traces backward with forward, so the same error comes when it compiles."""
    arguments = copies(sample_arguments("fused_norm_add", "cpu", torch.float32))
    arguments["norm_weight"].requires_grad_()
    compiled = torch.compile(
        lambda: packet("fused_norm_add")(**arguments), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="moe_mps::fused_norm_add: backward is not implemented"):
        compiled().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(), packet("fused_norm_add")(**arguments))


def test_jvp_fails_by_name():
    arguments, _ = floating_arguments("silu_mul_stacked", "cpu")
    gate, up = arguments["gate"], arguments["up"]
    with pytest.raises(NotImplementedError, match="moe_mps::silu_mul_stacked: forward-mode"):
        torch.func.jvp(packet("silu_mul_stacked"), (gate, up), (gate, up))


def test_grad_of_a_function_fails_by_name(device):
    arguments, _ = floating_arguments("silu_mul_stacked", device)
    with pytest.raises(NotImplementedError, match=r"moe_mps::silu_mul_stacked.*not implemented"):
        torch.func.grad(lambda gate: packet("silu_mul_stacked")(gate, arguments["up"]).sum())(
            arguments["gate"]
        )


def test_torch_func_is_named_where_there_is_a_backward(device):
    x, weight, ids = (torch.ones(size, device=device) for size in ((2, 8), (3, 4, 8), (2, 1)))
    with pytest.raises(NotImplementedError) as error:
        torch.func.grad(lambda x: packet("expert_mm")(x, ids.int(), weight).sum())(x)
    assert str(error.value) == (
        "moe_mps::expert_mm: gradients by torch.func (grad, vjp, jacrev) are not implemented: use backward() "
        "or torch.autograd.grad"
    )


@pytest.mark.filterwarnings("ignore:Error detected in _NoBackward")
def test_a_second_backward_fails_by_name(device):
    """Also where the first one reads an argument that alone needs the second."""
    x, weight, ids = (torch.ones(size, device=device) for size in ((2, 8), (3, 4, 8), (2, 1)))
    leaves = x.requires_grad_(), weight.requires_grad_()
    out = packet("expert_mm")(leaves[0], ids.int(), leaves[1]).square().sum()
    plain = torch.autograd.grad(out, leaves, retain_graph=True)
    for leaf, right, gradient in zip(
        leaves, plain, torch.autograd.grad(out, leaves, create_graph=True), strict=True
    ):
        assert torch.equal(gradient, right) and gradient.requires_grad
        for second in leaves:
            with pytest.raises(
                RuntimeError, match=r"moe_mps::expert_mm: a backward of its backward"
            ) as error:
                torch.autograd.grad(gradient.sum(), second, retain_graph=True)
            assert "\n" not in str(error.value), leaf.shape


IN_PLACE = [name for name in WITH_NUMBERS if name.endswith("_")]


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_in_place_is_seen_by_autograd(device, name):
    """What was saved for a backward pass and overwritten since gives an error, not a wrong gradient."""
    arguments = copies(sample_arguments(name, device, torch.float32))
    written = [value for argument, value in arguments.items() if argument.endswith("_")]
    versions = [tensor._version for tensor in written]
    factor = torch.ones(written[-1].shape, device=device, requires_grad=True)
    product = (factor * written[-1]).sum()
    packet(name)(**arguments)
    assert all(tensor._version > version for tensor, version in zip(written, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_in_place_over_other_arguments(device, name):
    """An argument that is written and another one, read or written, as views of one buffer."""
    arguments = copies(sample_arguments(name, device, torch.float32))
    tensors = [argument for argument, value in arguments.items() if isinstance(value, Tensor)]
    written = [argument for argument in tensors if argument.endswith("_")]
    pairs = [(w, n) for w in written for n in tensors if n not in written[: written.index(w) + 1]]
    pairs = [pair for pair in pairs if len({arguments[n].itemsize for n in pair}) == 1]
    assert pairs
    for target, other in pairs:
        a, b = arguments[other], arguments[target]
        buffer = torch.cat([a.flatten(), b.flatten().view(a.dtype)])
        of_target = buffer[1 : 1 + b.numel()].view(b.dtype)
        views = {other: buffer[: a.numel()].view(a.shape), target: of_target.view(b.shape)}
        message = f"moe_mps::{name}: {target} must be free of overlap with {other}, got a view of the same"
        with pytest.raises(ValueError, match=message):
            packet(name)(**{**arguments, **views})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_with_weights_that_need_gradients(device, mode):
    for name in OPERATORS:
        arguments, floating = floating_arguments(name, device)
        for argument in floating:
            arguments[argument] = arguments[argument].requires_grad_()
        with mode():
            result = packet(name)(**arguments)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        assert not any(output.requires_grad for output in outputs)


def test_in_place_on_a_leaf_that_needs_gradients(device):
    arguments = copies(sample_arguments("weighted_sum_residual_stacked_", device, torch.float32))
    arguments["residual_"].requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        packet("weighted_sum_residual_stacked_")(**arguments)


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_views_beside_a_gradient(device, name):
    """A slice is written, and backward fails by name; what autograd forbids to write is not written."""
    arguments, floating = floating_arguments(name, device)
    written = [n for n in arguments if n.endswith("_") and arguments[n] is not None]
    expected = copies(arguments)
    with torch.no_grad():
        packet(name)(**expected)
    leaf = floating[0]

    def with_views(choose) -> dict:
        buffers = {n: torch.stack([arguments[n], arguments[n]]) for n in written}
        views = {n: choose(buffer) for n, buffer in buffers.items()}
        return arguments | views | {leaf: arguments[leaf].clone().requires_grad_()}

    views = with_views(lambda buffer: buffer[1])
    packet(name)(**views)
    for n in written:
        assert torch.equal(views[n].detach().cpu(), expected[n].cpu())
        assert views[n]._base.requires_grad == views[n].is_floating_point()
    needy = [views[n]._base for n in written if views[n].is_floating_point()]
    if not needy:
        return  # integers take no gradient: autograd forbids nothing
    with pytest.raises(RuntimeError, match=f"moe_mps::{name}: backward is not implemented"):
        needy[0].sum().backward()

    def forbidden(buffer):
        with torch.no_grad():
            return buffer[1]

    refused = with_views(forbidden)
    message = f"moe_mps::{name}: .*_ cannot be written in place where gradients are recorded"
    with pytest.raises(RuntimeError, match=message) as error:
        packet(name)(**refused)
    assert "\n" not in str(error.value)
    assert all(torch.equal(refused[n].detach().cpu(), arguments[n].cpu()) for n in written)
