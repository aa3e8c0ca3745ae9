"""Checkpoints as other libraries write them, with the values that these stand for."""

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support import tiny_models
from support.checkpoints import changed
from torch_moe_mps.checkpoints.quantize.weights import quantized_names
from torch_moe_mps.models.modules.linears import formats_in
from torch_moe_mps.ops._formats import QuantizedWeight

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

    def of(self, name: str) -> "Writer":
        """The writer of a matrix."""
        return self

    def integers(self, weight: torch.Tensor, dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zero points of groups, and the values."""
        columns = weight.shape[1]
        size = self.group or columns
        weight = torch.nn.functional.pad(weight, (0, -columns % size))  # the last group may be smaller
        low, high = ranges(weight, size)
        most = 2**self.bits - 1
        if self.symmetric:
            scales = (torch.maximum(high.abs(), low.abs()) / (most // 2)).to(dtype)
            zeros = torch.full_like(scales, 2 ** (self.bits - 1)).int()
        else:
            scales = ((high - low) / most).to(dtype)
            zeros = (-low / scales.float()).round().clamp(0, most).int()
        each = weight.float().unflatten(1, (-1, size)) / scales.float().unsqueeze(-1)
        codes = (each.round() + zeros.unsqueeze(-1)).clamp(0, most).int()
        values = (codes - zeros.unsqueeze(-1)) * scales.float().unsqueeze(-1)
        codes, values = (tensor.flatten(1)[:, :columns].contiguous() for tensor in (codes, values))
        return codes, scales, zeros, values


def compressed(form: str, **weights):
    """The quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    config = {"format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"method": "compressed-tensors", **config}


def grouped(size: int) -> dict:
    return {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}


class CompressedTensors(Writer):
    def __init__(self, group: int = 32, bits: int = 4, symmetric: bool = True):
        how = {"num_bits": bits, "type": "int", "symmetric": symmetric, **grouped(group)}
        config = compressed("pack-quantized", **how)
        super().__init__(group=group, bits=bits, symmetric=symmetric, **config)

    def __call__(self, weight):
        codes, scales, zeros, values = self.integers(weight, torch.bfloat16)
        tensors = {"weight_packed": stream(codes, self.bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if not self.symmetric:
            tensors["weight_zero_point"] = stream(zeros.T, self.bits).T.contiguous()
        return tensors, values


class Int8(Writer):
    def __init__(self):
        how = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        super().__init__(group=0, bits=8, **compressed("int-quantized", **how))

    def __call__(self, weight):
        codes, scales, _, values = self.integers(weight, torch.bfloat16)
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, values


class Awq(Writer):
    def __init__(self, group: int = 32):
        super().__init__("awq", group, symmetric=False, version="gemm")
        self.config |= {"bits": 4, "group_size": group, "zero_point": True}

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
        super().__init__("gptq", checkpoint_format=form, format=form, desc_act=order, **how)
        self.config |= {"bits": self.bits, "group_size": self.group, "sym": self.symmetric}
        self.less, self.order = 2 - version, order

    def __call__(self, weight):
        columns = weight.shape[1]
        order = torch.randperm(columns) if self.order else torch.arange(columns)
        codes, scales, zeros, values = self.integers(weight[:, order], torch.float16)
        back, group_of = order.argsort(), torch.empty(columns, dtype=torch.int32)
        group_of[order] = torch.arange(columns, dtype=torch.int32) // self.group
        tensors = {
            "qweight": stream(codes[:, back], self.bits).T.contiguous(),
            "qzeros": stream((zeros - self.less).T % 2**self.bits, self.bits),
            "scales": scales.T.contiguous(),
            "g_idx": group_of,
        }
        return tensors, values[:, back]


class AutoRound(Writer):
    """AutoRound's export of another writer's integers; only its packing of gptqmodel has group numbers."""

    def __init__(self, packing: str, writer: Awq | Gptq):
        self.writer, how = writer, {"packing_format": f"auto_round:{packing}", "data_type": "int"}
        super().__init__("auto-round", writer.group, writer.bits, writer.symmetric, act_bits=16, **how)
        self.config |= {"bits": self.bits, "group_size": self.group, "sym": self.symmetric}

    def __call__(self, weight):
        tensors, values = self.writer(weight)
        if "gptqmodel" not in self.config["packing_format"]:
            tensors.pop("g_idx", None)
        return tensors, values


class Fp4(Writer):
    """MXFP4 or NVFP4; `factor` multiplies the scales of a matrix."""

    def __init__(self, method: str, group: int, factor: float | None = None):
        kind, strategy = ("mxfp4", "group") if group == 32 else ("nvfp4", "tensor_group")
        how = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group, "strategy": strategy}
        theirs = compressed(f"{kind}-pack-quantized", **how)
        modelopt = {"method": method, "quant_algo": kind.upper(), "group_size": group}
        super().__init__(group=group, **(modelopt if method == "modelopt" else theirs))
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
    """A scale for everything (None, or this one), for rows or for blocks; by powers of two if `whole`."""

    def __init__(self, method: str, part: str, block: str | float | tuple[int, int] | None, whole: bool):
        strategy = "channel" if block == "row" else "tensor"
        how = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if block == "row" else "FP8"
        config = {
            "compressed-tensors": compressed("float-quantized", **how),
            "modelopt": {"method": method, "quant_algo": algorithm},
            "fp8": {"method": method, "weight_block_size": [*block] if isinstance(block, tuple) else None},
        }
        super().__init__(**config[method])
        self.part, self.block, self.whole = part, block, whole

    def __call__(self, weight):
        weight, (rows, columns) = weight.float(), weight.shape
        blocks = isinstance(self.block, tuple)
        if self.block == "row":
            scales = weight.abs().amax(1, keepdim=True) / 448
        elif self.block is None:
            scales = weight.abs().amax().reshape(1) / 448
        elif blocks:
            high, wide = self.block
            scales = torch.rand(-(-rows // high), -(-columns // wide)) * 0.001 + 0.0005
        else:
            scales = torch.tensor([self.block])
        if self.whole:
            scales = scales.log2().ceil().exp2()
        full = scales
        if blocks:
            full = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        codes = (weight / full).clamp(-448, 448).to(E4M3)
        return {"weight": codes, self.part: scales}, codes.float() * full


def matrices(model) -> list[str]:
    """The weights that these libraries quantise: linear layers but for the head and routers."""
    left = ("lm_head", "embed", "router", ".gate.")
    return [
        name for name, tensor in model.items()
        if name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[1] % 32 == 0
        and not any(part in name for part in left)
    ]  # fmt: skip


# {architecture: the gate's rows among 2 I of the first matrix}, of those whose experts are [E, C, N]
TURNED = {"gpt_oss": lambda i: torch.arange(0, 2 * i, 2), "llama4": torch.arange}


def apart(tensors, architecture):
    """Makes a module of each expert of such stacks, as llm-compressor and GPTQModel do."""
    made = {}
    for name, tensor in tensors.items():
        owner, found, parameter = name.rpartition(".experts.")
        if architecture not in TURNED or not found:
            made[name] = tensor
            continue
        projection, part = parameter.removesuffix("_bias"), "bias" if "bias" in parameter else "weight"
        rows = torch.arange(tensor.shape[-1])
        gate = TURNED[architecture](len(rows) // 2)
        halves = {"gate_proj": gate, "up_proj": rows[~torch.isin(rows, gate)]}
        for e, matrix in enumerate(tensor if part == "bias" else tensor.mT):
            for each, of in (halves if "gate" in projection else {projection: rows}).items():
                made[f"{owner}.experts.{e}.{each}.{part}"] = matrix[of]
    return made


def together(tensors, architecture):
    """Makes one tensor of those of all experts of a layer, in the order of transformers' parameters."""
    made, found, turned = {}, {}, architecture in TURNED
    for name, tensor in tensors.items():
        owner, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            made[name] = tensor
            continue
        expert, projection, part = rest.split(".")
        if part != "weight_shape":
            found.setdefault((f"{owner}.experts", part), {})[int(expert), projection] = tensor
    for (owner, part), each in found.items():
        end = "" if part == "weight" else f"_{part}" if turned else part.removeprefix("weight")
        experts = range(1 + max(e for e, _ in each))
        halves = [(each[e, "gate_proj"], each[e, "up_proj"]) for e in experts]
        both = [gate if gate.numel() == 1 else torch.cat((gate, up)) for gate, up in halves]
        rows = torch.arange(len(both[0]))
        gate = TURNED.get(architecture, torch.arange)(len(rows) // 2)
        order = torch.cat((gate, rows[~torch.isin(rows, gate)])).argsort()
        stacks = {
            "gate_up_proj": torch.stack(both)[:, order],
            "down_proj": torch.stack([each[e, "down_proj"] for e in experts]),
        }
        for projection, stack in stacks.items():
            one = stack.flatten()[0] if part == "weight_scale_2" or stack.shape[1:] == (1,) else stack
            made[f"{owner}.{projection}{end}"] = one.mT if turned and one.dim() == 3 else one
    return {name: tensor.contiguous() for name, tensor in made.items()}


def tiny(architecture: str):
    if architecture != "llama4":
        return tiny_models.tiny_model(architecture)
    cls = transformers.Llama4ForCausalLM  # without its vision tower
    model = cls(tiny_models.build_config(cls.config_class)).eval()
    tiny_models.randomise(model, 0)
    return model


def write(folder, writer, architecture: str = "qwen3_moe", only=lambda name: True, **sizes):
    """A checkpoint, in which each expert is a module, and the model with the values that it stands for."""
    torch.manual_seed(0)
    with tiny_models.groups_of_32(), tiny_models.sizes(**sizes):
        model = tiny(architecture).to(torch.bfloat16)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    written, values = quantised(writer, apart(load_file(file), architecture), only)
    values = together(values, architecture) if architecture in TURNED else values
    save_file({n: t.to(torch.float32) for n, t in values.items()}, file, {"format": "pt"})
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    say(folder, writer, written)
    return dense.eval()


def quantised(writer, tensors, only=lambda name: True) -> tuple[dict, dict]:
    """The tensors of a checkpoint with quantised matrices, and with the values that they stand for."""
    written, values = dict(tensors), dict(tensors)
    for name in filter(only, matrices(tensors)):
        made, values[name] = writer.of(name)(written.pop(name))
        written |= {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}
    return written, values


def say(folder, writer, written) -> None:
    """Puts tensors into a folder, and how they are quantised into its config."""
    tensors = {name: tensor.contiguous() for name, tensor in written.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with changed(folder / "config.json") as config:
        config["quantization_config"] = writer.config


def weights(model, expected):
    """What is quantised, dequantised, and the same of the other model."""
    for name, module in model.named_modules():
        for parameter, format in formats_in(module).items():
            tensors = [getattr(module, part, None) for part in quantized_names(parameter)]
            values = QuantizedWeight(*tensors, format).values(slice(None))
            other = getattr(expected.get_submodule(name), parameter)
            yield values, other.mT if tiny_models.is_turned(module) else other


class Library(Writer):
    """compressed-tensors itself, by the name of a scheme; values are what it dequantises to."""

    def __init__(self, scheme: str, group: int | None = None):
        self.scheme = preset_name_to_scheme(scheme, ["re:.*proj$"])
        self.args = self.scheme.weights
        if group is not None:
            self.args.group_size = group
        ignore = ["lm_head", "re:.*gate$"]
        config = QuantizationConfig(config_groups={"group_0": self.scheme}, ignore=ignore)
        self.config = config.model_dump(mode="json", exclude_none=True) | {"format": FORMATS[scheme]}
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
        if strategy == "tensor_group":  # the library's decompress rounds scales and values to bfloat16
            rows, columns = weight.shape
            codes = unpack_fp4_from_uint8(made["weight_packed"], rows, columns, torch.float32)
            scales, scale = made["weight_scale"].float(), made["weight_global_scale"]
            values = dequantize(codes, scales, None, self.args, torch.float32, scale)
        else:
            values = self.compressor.decompress(wide, self.scheme)["weight"]
        return {name: t for name, t in made.items() if t is not None}, values.contiguous()


FORMATS = {
    "W4A16": "pack-quantized", "W4A16_ASYM": "pack-quantized", "W8A16": "pack-quantized",
    "W8A8": "int-quantized", "FP8": "float-quantized", "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized", "NVFP4A16": "nvfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
}  # fmt: skip
