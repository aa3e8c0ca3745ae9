"""Checkpoints that other libraries quantised: the same codes, and the values of their own arithmetic."""

import itertools
import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.models import assert_close, output, prompt
from transformers import AutoModelForCausalLM

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.ops._formats import QuantizedWeight
from torch_moe_mps.transformers.checkpoints import quantizer
from torch_moe_mps.transformers.checkpoints.weights import quantized_names
from torch_moe_mps.transformers.modules.linears import OrderedLinear, formats_in

E4M3 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] -> int32 words of a stream of bits, the lowest first."""
    flags = (codes.long().unsqueeze(-1) >> torch.arange(bits) & 1).flatten(1)
    words = (flags.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def ranges(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, size))
    return groups.amin(-1), groups.amax(-1)


class Writer:
    """Makes tensors of a matrix [N, C], and says which values these stand for."""

    def __init__(self, method: str, group: int = 32, bits: int = 4, symmetric: bool = True, **config):
        self.group, self.bits, self.symmetric = group, bits, symmetric
        self.config = {"quant_method": method, **config}

    def integers(self, weight: torch.Tensor, dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zero points of groups, and the values."""
        size = self.group or weight.shape[1]
        low, high = ranges(weight, size)
        most = 2**self.bits - 1
        if self.symmetric:
            scales = (torch.maximum(high.abs(), low.abs()) / (most // 2)).to(dtype)
            zeros = torch.full_like(scales, 2 ** (self.bits - 1)).int()
        else:
            scales = ((high - low) / most).to(dtype)
            zeros = (-low / scales.float()).round().clamp(1, most).int()
        each = weight.float().unflatten(1, (-1, size)) / scales.float().unsqueeze(-1)
        codes = (each.round() + zeros.unsqueeze(-1)).clamp(0, most).int()
        values = (codes - zeros.unsqueeze(-1)) * scales.float().unsqueeze(-1)
        return codes.flatten(1), scales, zeros, values.flatten(1)


class CompressedTensors(Writer):
    def __init__(self, **how):
        super().__init__("compressed-tensors", **how)

    def __call__(self, weight):
        codes, scales, zeros, values = self.integers(weight, torch.bfloat16)
        tensors = {"weight_packed": stream(codes, self.bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if not self.symmetric:
            tensors["weight_zero_point"] = stream(zeros.T, self.bits).T.contiguous()
        return tensors, values


class Int8(Writer):
    def __init__(self):
        super().__init__("compressed-tensors", group=0, bits=8)

    def __call__(self, weight):
        codes, scales, _, values = self.integers(weight, torch.bfloat16)
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, values


class Awq(Writer):
    def __init__(self, **how):
        super().__init__("awq", symmetric=False, version="gemm", **how)

    def words(self, codes):
        """[n, rows] -> int32 [n, rows / 8]."""
        eights = codes.long().unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return stream(eights.flatten(1), 4)

    def __call__(self, weight):
        codes, scales, zeros, values = self.integers(weight, torch.float16)
        made = {
            "qweight": self.words(codes.T),
            "qzeros": self.words(zeros.T),
            "scales": scales.T.contiguous(),
        }
        return made, values


class Gptq(Writer):
    def __init__(self, version: int = 1, order: bool = False, **how):
        form = "gptq" if version == 1 else "gptq_v2"
        super().__init__("gptq", checkpoint_format=form, desc_act=order, **how)
        self.less, self.order = 2 - version, order

    def __call__(self, weight):
        columns = weight.shape[1]
        order = torch.randperm(columns) if self.order else torch.arange(columns)
        codes, scales, zeros, values = self.integers(weight[:, order], torch.float16)
        back, group_of = order.argsort(), torch.empty(columns, dtype=torch.int32)
        group_of[order] = torch.arange(columns, dtype=torch.int32) // self.group
        tensors = {
            "qweight": stream(codes[:, back], self.bits).T.contiguous(),
            "qzeros": stream((zeros - self.less).T, self.bits),
            "scales": scales.T.contiguous(),
            "g_idx": group_of,
        }
        return tensors, values[:, back]


class Fp4(Writer):
    """MXFP4 or NVFP4; `factor` multiplies the scales of a matrix."""

    def __init__(self, method: str, group: int, factor: float | None = None):
        super().__init__(method, group=group)
        self.factor = factor

    def __call__(self, weight):
        groups = weight.float().unflatten(1, (-1, self.group))
        wanted = groups.abs().amax(-1) / 6
        if self.group == 32:
            exponents = wanted.log2().ceil()
            scales, stored = exponents.exp2(), (exponents + 127).to(torch.uint8)
        else:
            stored = (wanted / (self.factor or 1)).to(E4M3)
            scales = stored.float() * (self.factor or 1)
        codes = (groups / scales.unsqueeze(-1)).unsqueeze(-1).sub(FP4).abs().argmin(-1)
        values = FP4[codes] * scales.unsqueeze(-1)
        pairs = codes.flatten(1).unflatten(1, (-1, 2))
        octets = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        ours = self.config["quant_method"] == "modelopt"
        tensors = {"weight" if ours else "weight_packed": octets, "weight_scale": stored}
        if self.factor is not None:
            name, factor = (
                ("weight_scale_2", self.factor) if ours else ("weight_global_scale", 1 / self.factor)
            )
            tensors[name] = torch.tensor([factor])
        return tensors, values.flatten(1)


class Fp8(Writer):
    """A scale for everything (), for rows ("row") or for blocks of 128; by powers of two if `whole`."""

    def __init__(self, method: str, part: str, block: str | int | None, whole: bool):
        super().__init__(method)
        self.part, self.block, self.whole = part, block, whole

    def __call__(self, weight):
        weight, (rows, columns) = weight.float(), weight.shape
        if self.block == "row":
            scales = weight.abs().amax(1, keepdim=True) / 448
        elif self.block is None:
            scales = weight.abs().amax().reshape(1) / 448
        else:
            scales = torch.rand(-(-rows // self.block), -(-columns // self.block)) * 0.001 + 0.0005
        if self.whole:
            scales = scales.log2().ceil().exp2()
        full = scales
        if isinstance(self.block, int):
            full = scales.repeat_interleave(self.block, 0)[:rows].repeat_interleave(self.block, 1)[
                :, :columns
            ]
        codes = (weight / full).clamp(-448, 448).to(E4M3)
        return {"weight": codes, self.part: scales}, codes.float() * full


# {name: (writer, format, whether the values are the library's to the bit)}
CASES = {
    "int4": (CompressedTensors(), "affine4_32", True),
    "int4 asymmetric": (CompressedTensors(symmetric=False, group=64), "affine4_64", False),
    "int4 of channels": (CompressedTensors(group=0), "affine4_64", True),
    "int8": (CompressedTensors(bits=8), "affine8_32", True),
    "int8 of channels": (Int8(), "affine8_64", True),
    "int3": (CompressedTensors(bits=3), "affine3_32", True),
    "awq": (Awq(), "affine4_32", False),
    "gptq": (Gptq(), "affine4_32", True),
    "gptq asymmetric": (Gptq(symmetric=False, bits=8), "affine8_32", False),
    "gptq v2": (Gptq(version=2, group=64), "affine4_64", True),
    "mxfp4": (Fp4("compressed-tensors", 32), "mxfp4", True),
    "nvfp4 exact": (Fp4("compressed-tensors", 16, 2.0**-3), "nvfp4", True),
    "nvfp4": (Fp4("compressed-tensors", 16, 0.0003), "affine6_32", False),
    "nvfp4 of modelopt": (Fp4("modelopt", 16, 0.0003), "affine6_32", False),
    "fp8 of rows": (Fp8("compressed-tensors", "weight_scale", "row", False), "affine8_32", False),
    "fp8 of all": (Fp8("compressed-tensors", "weight_scale", None, True), "mxfp8", True),
    "fp8 of blocks": (Fp8("fp8", "weight_scale_inv", 128, False), "affine8_32", False),
    "fp8 of blocks by powers": (Fp8("fp8", "weight_scale_inv", 32, True), "mxfp8", True),
}


def matrices(model) -> list[str]:
    """The weights that these libraries quantise: linear layers but for the head and routers."""
    left = ("lm_head", "embed", "router", ".gate.")
    return [
        name for name, tensor in model.items()
        if name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[1] % 32 == 0
        and not any(part in name for part in left)
    ]  # fmt: skip


def write(folder, writer, architecture: str = "qwen3_moe", only=lambda name: True, **sizes):
    """A checkpoint, in which each expert is a module, and the model with the values that it stands for."""
    torch.manual_seed(0)
    with tiny_models.groups_of_32(), tiny_models.sizes(**sizes):
        model = tiny_models.tiny_model(architecture).to(torch.bfloat16)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    written, values = dict(tensors), dict(tensors)
    for name in filter(only, matrices(tensors)):
        made, values[name] = writer(written.pop(name))
        written |= {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}
    save_file({n: t.to(torch.float32) for n, t in values.items()}, file, {"format": "pt"})
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": writer.config}))
    return dense.eval()


def weights(model, expected):
    """What is quantised, dequantised, and the same of the other model."""
    for name, module in model.named_modules():
        for parameter, format in formats_in(module).items():
            tensors = [getattr(module, part, None) for part in quantized_names(parameter)]
            values = QuantizedWeight(*tensors, format).values(slice(None))
            if isinstance(module, OrderedLinear):
                values = values[:, module.order.argsort()]
            yield values, getattr(expected.get_submodule(name), parameter)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_library(name, tmp_path):
    writer, format, exact = CASES[name]
    expected = write(tmp_path, writer)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    formats = {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert formats == {format}
    errors = [entry.error for entries in model.hf_quantizer.report.modules.values() for entry in entries]
    assert len(errors) > 5 and all((error == 0) == exact for error in errors)
    # Rounded zero points change little; what is quantised again changes as much as its format says.
    bound = 1e-5 if exact else 0.02 if format.startswith("affine4") or "gptq" in name else 0.2
    assert_close(output(model, prompt()), output(expected, prompt()), bound)
    for weight, values in weights(model, expected):
        if exact:
            assert torch.equal(weight, values)
        else:
            assert_close(weight, values, 0.03)


@pytest.mark.parametrize("name", ["int4", "gptq asymmetric"])
def test_it_is_read_for_the_gpu(name, simulated, tmp_path):
    """With the same words as on the CPU."""
    write(tmp_path, CASES[name][0])
    model, other = (
        torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32, device_map=place)
        for place in ("cpu", "mps")
    )
    state = other.state_dict()
    assert all(state[name].device.type == "mps" for name in state)
    assert all(torch.equal(tensor, state[name].cpu()) for name, tensor in model.state_dict().items())


def test_an_order_of_columns_is_one_of_the_inputs(tmp_path):
    """GPTQ's act-order, of linear layers; experts take no inputs in an order."""
    expected = write(tmp_path / "dense", Gptq(order=True, group=32), "llama")
    model = torch_moe_mps.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    # One group of columns has no order: each o_proj.
    assert sum(isinstance(module, OrderedLinear) for module in model.modules()) == 12
    assert all(torch.equal(*pair) for pair in weights(model, expected))
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)

    write(tmp_path / "experts", Gptq(order=True))
    with pytest.raises(ValueError, match="must be made of matrices whose columns are in order"):
        torch_moe_mps.from_pretrained(tmp_path / "experts")


@pytest.mark.parametrize(
    "architecture", ["deepseek_v3", "glm4_moe", "mixtral", "qwen3_next", "kimi_linear", "qwen3"]
)
def test_models_that_people_have(architecture, tmp_path):
    """What cannot be quantised here, such as a weight that code reads, is dequantised."""
    expected = write(tmp_path, CASES["int4"][0], architecture)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    found = [torch.equal(*pair) for pair in weights(model, expected)]
    assert len(found) > 8 and all(found)
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)


def stack(folder) -> None:
    """Makes one tensor of those of all experts of a layer, as transformers' parameters are."""
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        before, _, rest = name.partition(".experts.")
        expert, projection, part = rest.split(".", 2)
        tensor = tensors.pop(name)
        if part != "weight_shape":
            group = found.setdefault((f"{before}.experts.", part.removeprefix("weight")), {})
            group[int(expert), projection] = tensor
    for (before, part), group in found.items():
        experts = range(1 + max(expert for expert, _ in group))
        joined = [torch.cat([group[e, "gate_proj"], group[e, "up_proj"]]) for e in experts]
        tensors[f"{before}down_proj{part}"] = torch.stack([group[e, "down_proj"] for e in experts])
        tensors[f"{before}gate_up_proj{part}"] = torch.stack(joined)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name", ["int4", "int4 asymmetric", "mxfp4", "fp8 of rows", "fp8 of blocks by powers"]
)
def test_experts_may_be_stacked(name, tmp_path):
    """The same codes, formats and values as of experts that are modules."""
    writer, format, _ = CASES[name]
    write(tmp_path, writer)
    apart = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    stack(tmp_path)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert {str(f) for module in model.modules() for f in formats_in(module).values()} == {format}
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in apart.state_dict().items())
    errors = [
        [entry.error for entries in each.hf_quantizer.report.modules.values() for entry in entries]
        for each in (model, apart)
    ]
    assert sorted(errors[0]) == pytest.approx(sorted(errors[1]))


def test_stacks_that_are_turned_are_refused(tmp_path):
    """gpt-oss has [experts, columns, rows]: its codes would pass for values."""
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        tensors[name] = tensors[name].to(E4M3)
        tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"^moe_mps::load: \S+gate_up_proj must be of \[experts, rows, columns\]"
    ):
        torch_moe_mps.from_pretrained(tmp_path)


def test_scales_of_one_expert_may_be_powers_of_two(tmp_path):
    """Its matrix alone would be mxfp8; all matrices of a parameter have one format."""
    one, other = Fp8("fp8", "weight_scale_inv", None, True), Fp8("fp8", "weight_scale_inv", None, False)
    writers = itertools.cycle([one, other, other])

    class Either:
        config = one.config

        def __call__(self, weight):
            return next(writers)(weight)

    expected = write(tmp_path, Either())
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert str(formats_in(model.model.layers[0].mlp.experts)["gate_up_proj"]) == "affine8_32"
    for weight, values in weights(model, expected):
        assert_close(weight, values, 0.02)


def test_recipes_may_be_mixed(tmp_path):
    """What is dense in the checkpoint stays so, unless bits are asked for."""
    attention, others = CompressedTensors(bits=8), CompressedTensors(group=64)

    class Mixed:
        config = others.config | {
            "config_groups": {"a": {"targets": ["re:.*self_attn.*"]}, "b": {"targets": ["re:.*mlp.*"]}},
            "ignore": ["re:.*o_proj", "lm_head"],
        }

        def __call__(self, weight):
            return (attention if len(weight) == 64 else others)(weight)

    expected = write(tmp_path, Mixed(), only=lambda name: "o_proj" not in name, intermediate_size=128)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    found = {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert found == {"affine8_32", "affine4_64"}
    assert isinstance(model.model.layers[0].self_attn.o_proj.weight, torch.nn.Parameter)
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)
    model = torch_moe_mps.from_pretrained(tmp_path, bits=6, group_size=32, dtype=torch.float32)
    assert {str(f) for f in formats_in(model.model.layers[0].self_attn.o_proj).values()} == {"affine6_32"}


@pytest.mark.parametrize("name", ["int4 asymmetric", "awq", "gptq", "nvfp4 exact"])
def test_transformers_loads_them_where_it_could_not(name, tmp_path, monkeypatch):
    """With no other package, by its own from_pretrained; what is saved is in our layout."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(quantizer, "find_spec", lambda package: None)
    expected = write(tmp_path / "theirs", CASES[name][0])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert_close(output(model, prompt()), output(expected, prompt()), 0.02)
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_close(output(again, prompt()), output(model, prompt()), 0.0)


@pytest.mark.parametrize("to", ["moe_mps", "mlx"])
def test_convert_keeps_the_codes(to, tmp_path, capsys):
    expected = write(tmp_path / "theirs", CASES["int4"][0])
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", to]) == 0
    model = torch_moe_mps.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert sum(torch.equal(*pair) for pair in weights(model, expected)) == 12  # head and embedding are new
    assert_close(output(model, prompt()), output(expected, prompt()), 0.5)


def change(folder, part: str, function) -> None:
    """Of the first matrix that has such a tensor; None takes it away."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "layers" in name and name.endswith(f"proj.{part}"))
    tensors[name] = function(tensors[name])
    kept = {n: t for n, t in tensors.items() if t is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "part", "function", "message"),
    [
        ("int4", "weight_scale", lambda t: None, "weight_scale must be in the checkpoint, got no such"),
        (
            "int4", "weight_scale", lambda t: t.repeat(1, 2),
            "weight_scale must be of groups of a multiple of 32 columns, got 4 for 64 columns",
        ),
        (
            "int4", "weight_packed", lambda t: t[:, :7].contiguous(),
            "weight_packed must be of 2, 3, 4, 5, 6 or 8 bits, got 3.5 bits in 64 columns",
        ),
        ("gptq", "g_idx", lambda t: t * 0, "g_idx must be 32 columns of each of 2 groups, got others"),
        ("awq", "qweight", lambda t: t.T.contiguous(), r"qweight must be of shape \(64, \d+\), got"),
        (
            "mxfp4", "weight_scale", lambda t: t[:, :1].contiguous(),
            "weight_scale must be of MXFP4 or NVFP4, got 1 of U8",
        ),
        ("fp8 of all", "weight_scale", lambda t: None, "weight_scale must be in the checkpoint"),
        (
            "fp8 of rows", "weight", lambda t: torch.full(t.shape, 127, dtype=torch.uint8).view(E4M3),
            " must be finite, got NaN",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(name, part, function, message, tmp_path):
    write(tmp_path, CASES[name][0])
    change(tmp_path, part, function)
    with pytest.raises(ValueError, match=rf"^moe_mps::load: \S+?{message}") as error:
        torch_moe_mps.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


class Library(Writer):
    """compressed-tensors itself, by the name of a scheme; values are what it dequantises to."""

    def __init__(self, scheme: str, group: int | None = None):
        self.scheme = preset_name_to_scheme(scheme, ["re:.*proj$"])
        self.args = self.scheme.weights
        if group is not None:
            self.args.group_size = group
        ignore = ["lm_head", "re:.*gate$"]
        config = QuantizationConfig(config_groups={"group_0": self.scheme}, ignore=ignore)
        self.config = config.model_dump(mode="json", exclude_none=True)
        self.compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme])

    def __call__(self, weight):
        weight, state = weight.to(torch.bfloat16), {}
        strategy, size = self.args.strategy, self.args.group_size
        if strategy == "block":
            high, wide = self.args.block_structure
            blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % wide, 0, -weight.shape[0] % high))
            parts = blocks.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
        elif strategy == "tensor":
            parts = weight.reshape(1, -1)
        else:
            parts = weight.unflatten(1, (-1, size or weight.shape[1]))
        low, high = parts.amin(-1), parts.amax(-1)
        if strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scales, zeros = calculate_qparams(low, high, self.args, state.get("weight_global_scale"))
        state |= {"weight": weight, "weight_scale": scales}
        if not self.args.symmetric:
            state["weight_zero_point"] = zeros
        made = self.compressor.compress(state, self.scheme)
        # Not rounded to the dtype of the scales, as it is where the library runs the model in that dtype.
        wide = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in made.items()}
        values = self.compressor.decompress(wide, self.scheme)["weight"]
        return {name: t for name, t in made.items() if t is not None}, values.contiguous()


FORMATS = {
    "W4A16": "pack-quantized", "W4A16_ASYM": "pack-quantized", "W8A16": "pack-quantized",
    "W8A8": "int-quantized", "FP8": "float-quantized", "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized", "NVFP4A16": "nvfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
}  # fmt: skip
# {scheme: (group, format, the largest difference of weights)}
SCHEMES = {
    "W4A16": (32, "affine4_32", 0),
    "W4A16_ASYM": (32, "affine4_32", 0.004),
    "W8A16": (32, "affine8_32", 0),
    "W8A8": (None, "affine8_64", 0),
    "FP8": (None, "affine8_32", 0.01),
    "FP8_DYNAMIC": (None, "affine8_32", 0.01),
    "FP8_BLOCK": (None, "affine8_32", 0.01),
    "NVFP4A16": (None, "affine6_32", 0.03),
    "MXFP4A16": (None, "mxfp4", 0),
    "MXFP8A16": (None, "mxfp8", 0),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_that_compressed_tensors_writes(scheme, tmp_path):
    """With targets and what it ignores as regular expressions."""
    group, format, bound = SCHEMES[scheme]
    expected = write(tmp_path, Library(scheme, group))
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    found = {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert format in found <= {format, "mxfp8"}  # the scale of a matrix may be a power of two
    for weight, values in weights(model, expected):
        assert_close(weight, values, bound)
    # A router may choose another expert where weights are not the same.
    assert_close(output(model, prompt()), output(expected, prompt()), 0.3 if bound else 1e-5)
