"""A quantised layer with what its module does to the result, in one call: modules of BERT, and like them."""

import copy

import pytest
import torch
from support import tiny_models
from support.launches import launches
from support.models import assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertPredictionHeadTransform
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaSelfOutput

import torch_moe_mps
from torch_moe_mps.quantization import QuantizedWeight
from torch_moe_mps.transformers.install import is_rewritten

CONFIG = BertConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2)
FORMAT = {"bits": 4, "group_size": 32}


class Projected(nn.Module):
    """One layer of 64 to 64 columns; `function` is all of a forward."""

    def __init__(self, function, bias: bool = True):
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64, bias=bias), function

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return self.function(self.layer, stream, x)


def built(make, dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """A quantised module that runs the operator, and its dense twin in float64."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": make()}).eval()
    tiny_models.randomise(model, 0)
    dense = copy.deepcopy(model.to(dtype)).float()
    torch_moe_mps.accelerate(model, **FORMAT)
    return model["block"], tiny_models.dense_twin(dense, model).double()["block"]


def inputs(module: nn.Module, rows: tuple[int, ...], dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    widths = {BertIntermediate: [64], BertOutput: [96, 64]}.get(type(module).__mro__[1], [64, 64])
    return [torch.randn(*rows, width, generator=generator).to(dtype) for width in widths]


MODULES = {
    "gelu": lambda: BertIntermediate(CONFIG),
    "norm": lambda: BertOutput(CONFIG),
    "norm of another model": lambda: XLMRobertaSelfOutput(CONFIG),
    "residual": lambda: Projected(lambda layer, stream, x: stream + layer(x)),
    "residual without a bias": lambda: Projected(lambda layer, stream, x: layer(x) + stream, bias=False),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("rows", [(1,), (2, 7), (33,)], ids=str)
@torch.no_grad()
def test_against_float64(name, rows):
    module, dense = built(MODULES[name])
    assert is_rewritten(module)
    given = inputs(module, rows)
    assert_close(module(*given).double(), dense(*(x.double() for x in given)), 1e-5)


@torch.no_grad()
def test_no_rows():
    module, _ = built(MODULES["norm"])
    assert module(*inputs(module, (2, 0))).shape == (2, 0, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_16_bits_round_once(dtype):
    """The sum with the residual is rounded, not the product before it: within half an ulp of float64."""
    module, dense = built(MODULES["residual"], dtype)
    layer, (stream, x) = module.layer, inputs(module, (50,), dtype)
    weight = QuantizedWeight(layer.packed, layer.scales, layer.biases, layer.format)
    dense.layer.weight.copy_(weight.values(slice(None)))
    expected = dense(stream.double(), x.double())
    half = torch.finfo(dtype).eps * 2.0 ** expected.abs().log2().floor() / 2
    assert ((module(stream, x).double() - expected).abs() <= 1.01 * half + 1e-6).all()


OTHERS = {
    "the stream twice": lambda layer, stream, x: layer(x) + stream + stream,
    "a difference": lambda layer, stream, x: stream - layer(x),
    "the layer of the sum": lambda layer, stream, x: layer(x + stream),
    "the mean of the stream": lambda layer, stream, x: layer(x) + stream.mean(0, keepdim=True),
    "a scaled layer": lambda layer, stream, x: 2 * layer(x) + stream,
    "an activation of the sum": lambda layer, stream, x: F.gelu(layer(x) + stream),
    "a norm without weights": lambda layer, stream, x: F.layer_norm(layer(x) + stream, (64,)),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_formulas_keep_their_code(name):
    module, dense = built(lambda: Projected(OTHERS[name]))
    assert not is_rewritten(module)
    given = inputs(module, (5,))
    assert_close(module(*given).double(), dense(*(x.double() for x in given)), 1e-5)


@torch.no_grad()
def test_a_transform_before_a_norm_keeps_its_code():
    assert not is_rewritten(built(lambda: BertPredictionHeadTransform(CONFIG))[0])


@torch.no_grad()
def test_what_is_called_otherwise():
    """By names, with a stream of one row for all, in another dtype, with a hook on a child."""
    module, dense = built(MODULES["norm"])
    x, stream = inputs(module, (2, 7))
    expected = dense(x.double(), stream.double())
    assert_close(module(input_tensor=stream, hidden_states=x).double(), expected, 1e-5)
    assert_close(module(x, input_tensor=stream).double(), expected, 1e-5)
    for one in (stream[:1, :1], stream[..., :1]):
        assert_close(module(x, one).double(), dense(x.double(), one.double()), 1e-5)
    assert_close(module(x, stream.bfloat16()).double(), dense(x.double(), stream.bfloat16().double()), 1e-5)
    for child in ("dense", "dropout", "LayerNorm"):
        seen = []
        hook = module.get_submodule(child).register_forward_hook(lambda *args, seen=seen: seen.append(args))
        assert_close(module(x, stream).double(), expected, 1e-5)
        hook.remove()
        assert len(seen) == 1, child


def test_training_keeps_the_dropout():
    module, _ = built(MODULES["norm"])
    x, stream = inputs(module, (2, 7))
    module.train()
    torch.manual_seed(0)
    first = module(x, stream)
    assert not torch.equal(first, module(x, stream))


@torch.no_grad()
def test_launches(simulated):
    """Of a layer of BERT: 9 for its own 12, as two sums and an activation join a matrix."""
    model = BertModel(CONFIG, add_pooling_layer=False).eval().to("mps", torch.bfloat16)
    own = copy.deepcopy(model)
    torch_moe_mps.accelerate(model, **FORMAT)
    ids = torch.arange(5, 14)[None].to("mps")
    before, after = (launches(simulated, lambda one=one: one(ids)) for one in (own, model))
    assert before.total() - after.total() == 3 * CONFIG.num_hidden_layers
    assert (before["add"] - after["add"], before["gelu"], after["gelu"]) == (4, 2, 0)
