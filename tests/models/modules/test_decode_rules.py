"""The rules of the decode step: each against the model's own code with the same weights."""

import copy
import inspect
import io
import pickle
import sys

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, in_parts, operators_of, output, prompt
from support.recognition import by_operators
from support.sweep import in_sweep, rows_in_sweep
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.modules.linears import QuantizedLinear
from torch_moe_mps.models.modules.rules.norms import call_of, is_norm
from torch_moe_mps.models.modules.rules.rope import RopeCall, rope_form, rotated, rotation_in_place
from torch_moe_mps.transformers.install import rewrite


def quantised(architecture: str = "qwen3_moe", dtype: torch.dtype = torch.float32):
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture, dtype))
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model


def attention(model) -> nn.Module:
    return model.model.layers[0].self_attn


def projections(model) -> list[QuantizedLinear]:
    return [getattr(attention(model), name) for name in ("q_proj", "k_proj", "v_proj")]


def one_by_one(model, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the model's own code, with the weights that the quantised layers hold."""
    return output(torch_moe_mps.restore(copy.deepcopy(model)), ids)


def tokens(model, count: int = 5) -> torch.Tensor:
    """The logits of single tokens after a prompt, of which the third and later ones are captured."""
    _, *each = in_parts(model, torch.arange(1, 10 + count)[None], *[1] * count)[0]
    return torch.cat(each, 1)


def memories(model) -> int:
    """In how many memories the projections' words lie."""
    return len({layer.packed.untyped_storage().data_ptr() for layer in projections(model)})


def test_joined_layers_share_their_weights(captured):
    """From the first token that is captured on; what is written into them later is read."""
    model = quantised()
    expected = tokens(torch_moe_mps.restore(copy.deepcopy(model)))
    assert memories(model) == 3
    assert_close(tokens(model), expected, 1e-5)
    assert memories(model) == 1 and captures_of(model).programs
    assert_close(output(model, prompt()), one_by_one(model, prompt()), 1e-5)
    for layer in projections(model):
        layer.scales.mul_(2)
    assert_close(tokens(model), tokens(torch_moe_mps.restore(copy.deepcopy(model))), 1e-5)
    for layer in projections(model)[:2]:
        layer.scales.data = layer.scales.data * 2
    assert_close(tokens(model), tokens(torch_moe_mps.restore(copy.deepcopy(model))), 1e-5)


def test_no_weight_moves_while_another_thread_reads_it(captured):
    model = quantised()
    captures_of(model)._inside = 1
    expected = tokens(torch_moe_mps.restore(copy.deepcopy(model)))
    assert_close(tokens(model), expected, 1e-5)
    assert memories(model) == 3 and captures_of(model).programs


def test_weights_that_lie_in_other_memory_stay_there(captured):
    """Here in another order, as a file may have them, or a module that has joined them itself."""
    model = quantised()
    expected = tokens(torch_moe_mps.restore(copy.deepcopy(model)))
    q, _, v = projections(model)
    whole = torch.cat([v.packed, q.packed])
    v.packed.data, q.packed.data = whole.split([v.rows, q.rows])
    assert_close(tokens(model), expected, 1e-5)
    assert v.packed.data_ptr() == whole.data_ptr() and captures_of(model).programs


WAYS = ("deepcopy", "save_pretrained", "pickle", "torch.save", "float16 and back")


@pytest.mark.parametrize("way", in_sweep(WAYS, WAYS[:2]))
def test_copies_of_joined_layers_stand_alone(way, captured, tmp_path):
    model = quantised()
    tokens(model)
    assert memories(model) == 1
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    elif way == "save_pretrained":
        model.save_pretrained(tmp_path)
        other = eager(torch_moe_mps.from_pretrained(tmp_path, type(model)))
        torch_moe_mps.accelerate(other)
    else:
        other = copy.deepcopy(model).half().float()
    before = output(model, prompt())
    assert_close(output(other, prompt()), before, 1e-5 if "16" not in way else 1e-2)
    for layer in projections(other):
        layer.scales.detach().zero_()
        layer.biases.detach().zero_()
    assert_close(output(model, prompt()), before, 0.0)
    assert_close(output(other, prompt()), one_by_one(other, prompt()), 1e-5)
    assert_close(tokens(other), tokens(torch_moe_mps.restore(copy.deepcopy(other))), 1e-5)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_are_used(assign, captured):
    model, source = quantised(), quantised()
    tokens(model)
    for layer in projections(source):
        layer.scales.data.mul_(2)
    model.load_state_dict(source.state_dict(), assign=assign)
    assert_close(output(model, prompt()), one_by_one(source, prompt()), 1e-5)
    assert_close(tokens(model), tokens(torch_moe_mps.restore(source)), 1e-5)


# Rotary embeddings

FUNCTIONS = sorted(
    {
        (name, architecture)
        for architecture in tiny_models.architectures()
        for name, function in inspect.getmembers(
            sys.modules[tiny_models.model_class(architecture).__module__], inspect.isfunction
        )
        if name.startswith("apply_rotary")
    }
)


def code(name: str, architecture: str) -> str:
    """Of a function and of those that it calls, as the one that turns halves."""
    module = sys.modules[tiny_models.model_class(architecture).__module__]
    function = inspect.unwrap(getattr(module, name))
    called = (getattr(module, each, None) for each in function.__code__.co_names)
    return "".join(map(inspect.getsource, (function, *filter(inspect.isfunction, called))))


# One of those with the same code: models copy it from each other.
DIFFERENT = {code(*each): each for each in reversed(FUNCTIONS)}.values()


@pytest.mark.parametrize(("name", "architecture"), rows_in_sweep(FUNCTIONS, DIFFERENT))
def test_form_of_rotary_functions(name, architecture):
    """The form agrees with the function for other shapes, numbers and dtypes than those of the trial."""
    function = getattr(sys.modules[tiny_models.model_class(architecture).__module__], name)
    found = rotation_in_place(function)
    assert found is not None
    _, forms = found.run.args
    assert found.done.operator == ("rope" if any(call.tensors == 2 for call in forms) else "rope_heads")
    own_code = lambda *args, **options: pytest.fail("fell back")  # noqa: E731
    for (tensors, is_complex, dims, options), form in forms.items():
        for turn, width in ((form.wide, 32), (form.narrow, 16)):
            if turn is None:
                continue
            inputs = [torch.randn(2, heads, 7, 32) for heads in (4, 2)][:tensors]
            if form.heads_dim == 2:
                inputs = [x.transpose(1, 2) for x in inputs]
            cos, sin = torch.randn(2, 2, 7, width)
            inputs += [torch.complex(cos, sin)] if is_complex else [cos, sin]
            inputs = inputs if dims == 4 else [x[0] for x in inputs]
            expected = function(*inputs, **dict(options))
            result = rotated(own_code, forms, *inputs, **dict(options))
            assert isinstance(result, tuple) == isinstance(expected, tuple)
            for a, b in zip(*((x,) if tensors == 1 else x for x in (result, expected)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_functions_that_are_no_rotation():
    for call in (RopeCall(2, False, 4), RopeCall(1, False, 4), RopeCall(2, True, 4)):
        assert rope_form(lambda q, k, cos, sin: (q, k), call) is None
        assert rope_form(lambda q, k, cos, sin: (q * cos[:, None], k * sin[:, None]), call) is None
        assert rope_form(lambda q, k, cos, sin: 1 / 0, call) is None


OWN_CALLS = {
    "wide": lambda q, k, cos: ((q, k, cos[..., :24], cos[..., :24]), {}),
    "float64": lambda q, k, cos: ((q.double(), k.double(), cos.double(), cos.double()), {}),
    "two dtypes": lambda q, k, cos: ((q, k.double(), cos, cos), {}),
    "by name": lambda q, k, cos: ((), {"q": q, "k": k, "cos": cos, "sin": cos}),
    "fewer queries than keys": lambda q, k, cos: ((q[:, :, -2:], k, cos, cos), {}),
    "no keys": lambda q, k, cos: ((q, None, cos, cos), {}),
    "other option": lambda q, k, cos: ((q, k, cos[0], cos[0]), {"unsqueeze_dim": 0}),
    "one batch's table": lambda q, k, cos: ((q, k, cos[0], cos[0]), {}),
    "list": lambda q, k, cos: ((q, k, cos, cos), {"unsqueeze_dim": [1]}),
}


@pytest.mark.parametrize("name", OWN_CALLS)
def test_other_calls_run_the_function_itself(name):
    function = sys.modules[tiny_models.model_class("qwen3_moe").__module__].apply_rotary_pos_emb
    _, forms = rotation_in_place(function).run.args
    args, options = OWN_CALLS[name](torch.randn(1, 2, 3, 32), torch.randn(1, 1, 3, 32), torch.randn(1, 3, 32))
    seen = []
    result = rotated(lambda *args, **options: seen.append((args, options)) or "own", forms, *args, **options)
    assert result == "own" and len(seen) == 1
    assert all(a is b for a, b in zip(seen[0][0], args, strict=True)) and seen[0][1].keys() == options.keys()


# Norms


class WithoutWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-3

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Doubled(WithoutWeight):
    def forward(self, x):
        return 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def test_a_norm_without_weight():
    call = call_of(WithoutWeight())
    assert (
        call is not None
        and call.weights == ()
        and call.absent == (None,)
        and [*call.numbers.values()] == [1e-3, 0.0]
    )
    assert call_of(Doubled()) is None
    norm, x = WithoutWeight().eval(), torch.randn(2, 3, 32)
    rewrite(norm)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    assert_close(by_operators(lambda: norm(x), "rms_norm").double(), expected, 1e-6)


class OfEveryFourth(Qwen4ExpTextRMSNorm):
    """Its groups are no neighbours."""

    def _norm(self, x):
        x = x.unflatten(-1, (-1, 4)).mT
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).mT.flatten(-2)


@pytest.mark.parametrize(("cls", "count"), [(Qwen4ExpTextRMSNorm, 1), (OfEveryFourth, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_groups_of_columns(cls, count, dtype):
    norm = cls(64, group_size=16, eps=1e-3).to(dtype).eval()
    norm.weight.data.copy_(torch.linspace(-1, 1, 64))
    x = torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(0)).to(dtype)[..., 8:72]
    with torch.no_grad():
        own = norm(x)
        assert not is_norm(norm)  # an operator with one norm for the row is none for it
        rewrite(norm)
        assert operators_of(lambda: norm(x)) == ({"rms_norm": 1} if count else {})
        assert_close(norm(x).float(), own.float(), 1e-6 if dtype == torch.float32 else 2.0**-7)


def test_norms_of_other_dtypes_run_their_own_code():
    """A float32 weight beside a bfloat16 input gives float32 where the module does not cast its result."""
    model = quantised(dtype=torch.bfloat16)
    norm = model.model.norm
    x = torch.randn(2, 3, norm.weight.shape[0], dtype=torch.float64)
    own = torch_moe_mps.restore(copy.deepcopy(norm))
    assert_close(by_operators(lambda: norm(x.bfloat16()), "rms_norm"), own(x.bfloat16()), 2.0**-7)
    assert operators_of(lambda: norm(x)) == {}
    assert norm(x).dtype == own(x).dtype and torch.equal(norm(x), own(x))


class BySteps(nn.Module):
    """A LayerNorm with a bias, zero-centred."""

    def __init__(self, width: int, power: float = 2.0):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.power = power

    def forward(self, x):
        centred = x.float() - x.float().mean(-1, keepdim=True)
        normed = centred / torch.sqrt(centred.pow(self.power).mean(-1, keepdim=True) + 1e-4)
        return ((1.0 + self.weight) * normed + self.bias).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "eps", "offset"),
    [
        (CohereLayerNorm(32), 1e-5, 0.0),
        (NemotronLayerNorm1P(32), 1e-5, 1.0),
        (OlmoLayerNorm(32), 1e-5, 0.0),
        (BySteps(32), 1e-4, 1.0),
        (nn.LayerNorm(32), 1e-5, 0.0),
        (nn.LayerNorm(32, 1e-3, bias=False), 1e-3, 0.0),
        (nn.LayerNorm(32, elementwise_affine=False), 1e-5, 0.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layer_norms(norm, eps, offset):
    norm = norm.eval().requires_grad_(False)
    weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([[9.0], [1.0], [1e-2]])
    wide = x.double() - x.double().mean(-1, keepdim=True)
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = expected if weight is None else expected * (weight.double() + offset)
    expected = expected if bias is None else expected + bias.double()
    assert rewrite(norm)[0]
    assert operators_of(lambda: norm(x)) == {"layer_norm": 1}
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"32|64"):  # its own error
        norm(torch.randn(3, 64))


@pytest.mark.parametrize("name", ["phi", "modernbert-decoder"])
def test_layer_norms_of_torch_in_models(name):
    """With a bias and without; the report says what runs, and `restore` gives the modules back."""
    model = tiny_models.tiny_model(name) if name == "phi" else tiny_models.other_model(name)
    model.eval()
    norms = {path for path, module in model.named_modules() if type(module) is nn.LayerNorm}
    expected = output(model, prompt(2, 5))
    report = torch_moe_mps.accelerate(model)
    assert {row.name for row in report.rows if [*map(str, row.done)] == ["layer_norm"]} == norms != set()
    ran = operators_of(lambda: assert_close(output(model, prompt(2, 5)), expected, 1e-5))
    assert ran["layer_norm"] == len(norms)
    torch_moe_mps.restore(model)
    assert all(type(model.get_submodule(path)) is nn.LayerNorm for path in norms)


def test_a_layer_norm_of_two_dimensions_keeps_its_own_code():
    assert not rewrite(nn.LayerNorm((4, 8)).eval())[0]


def test_a_layer_norm_of_another_power_keeps_its_own_code():
    norm = BySteps(32, 4.0).eval()
    assert not rewrite(norm)[0]


def test_layer_norms_of_wider_weights():
    """A norm that gives its result in the dtype of its input does so with a wider weight, too."""
    norm, x = tiny_models.tiny_model("cohere").model.norm, torch.randn(2, 3, 32).bfloat16()
    rewrite(norm)
    with torch.no_grad():
        expected = torch.nn.functional.layer_norm(x.float(), (32,), norm.weight, None, norm.variance_epsilon)
        ran = operators_of(lambda: assert_close(norm(x), expected.bfloat16(), 8e-3))
    assert ran["layer_norm"] == 1
