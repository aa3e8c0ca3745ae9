"""GGUF files: packed, with the file's values."""

import itertools
import os

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
from safetensors.torch import load_file, save_file
from support.gguf_blocks import type_of
from support.gguf_files import FIRST_LOADER, class_of, dense, of_architecture, write, write_file
from support.launches import operators_of_token
from support.memory import Memory
from support.models import stored
from support.sweep import rows_in_sweep
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, DynamicCache

import torch_moe_mps
from torch_moe_mps import quantization
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.checkpoints.gguf import file as gguf_file
from torch_moe_mps.checkpoints.quantize.target import quantizable
from torch_moe_mps.checkpoints.quantize.weights import quantized_names
from torch_moe_mps.models.basics.report import any_layer
from torch_moe_mps.models.modules.linears import OrderedLinear, formats_in
from torch_moe_mps.models.upstream.calls import cache_argument

IDS = torch.arange(1, 9)[None]
CASES = [
    ("llama", ("q4_k", "q6_k", "q5_k"), {}),  # rows of q and k move
    ("qwen2", ("q4_0", "q5_0", "iq4_nl"), {"tied": True}),
    ("qwen3moe", ("nvfp4", "q2_k", "q5_1"), {}),
    ("qwen35", ("q4_k", "q6_k", "q5_k"), {}),  # an input is taken in another order
    ("qwen3moe", ("q4_k", "q6_k", "q5_k"), {"up": "q5_k"}),  # gate and up are two matrices
    ("qwen3moe", ("iq2_xxs", "iq3_s", "iq1_m"), {}),  # codebook formats
    # In the sweep:
    ("qwen35moe", ("iq4_xs", "q4_1", "q8_0"), {"tied": True}),  # blocks move instead
    ("lfm2", ("iq4_nl", "q3_k", "q2_k"), {}),
    ("qwen3moe", ("iq1_s", "tq2_0", "iq2_xs"), {}),
    ("qwen3moe", ("q4_k", "q6_k", "iq4_xs"), {}),
    ("qwen2", ("q4_1", "q8_0", "mxfp4"), {}),
]


def load(path, device_map="cpu", cls=AutoModelForCausalLM, **options):
    return torch_moe_mps.from_pretrained(path, cls, device_map=device_map, check=False, **options)


def logits(model):
    ids = IDS.to(model.device)
    of_decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **of_decoder).logits.cpu()


@pytest.mark.parametrize(
    ("architecture", "kinds", "options"), rows_in_sweep(CASES, (CASES[0], CASES[3], CASES[5]))
)
def test_packed_and_exact(tmp_path, recwarn, architecture, kinds, options):
    """The file's bytes and a little more; the dense model's logits; the same after saving and reading."""
    path = write_file(tmp_path / "model.gguf", architecture, kinds, **options)
    model = load(path)
    assert not [w for w in recwarn if "GGUF" in str(w.message)]
    formats = {format.name for module in model.modules() for format in formats_in(module).values()}
    report = model.hf_quantizer.report
    assert formats == {str(entry.format) for own in report.modules.values() for entry in own} == set(kinds)
    assert not report.skipped
    assert any(isinstance(m, OrderedLinear) for m in model.modules()) == (architecture == "qwen35")
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert sum(tensor.nbytes for tensor in stored(model)) <= 1.05 * os.path.getsize(path)
    model.save_pretrained(tmp_path / "saved")
    again = torch_moe_mps.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), found) and again.dtype == model.dtype == torch.float32


def test_types_without_values_in_the_package(tmp_path):
    """Q1_0, and Q2_0, which the package gguf does not know: the logits of a file of their values."""
    kinds = ("q1_0", "q2_0", "q4_0")
    path = write_file(tmp_path / "model.gguf", "qwen3moe", kinds)
    values = write_file(tmp_path / "values.gguf", "qwen3moe", [f"={kind}" for kind in kinds])
    model = load(path)
    formats = {format.name for module in model.modules() for format in formats_in(module).values()}
    assert formats == {*kinds} and not model.hf_quantizer.report.skipped
    expected, found = logits(load(values)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert sum(tensor.nbytes for tensor in stored(model)) <= 1.05 * os.path.getsize(path)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(torch_moe_mps.from_pretrained(tmp_path / "saved")), found)


@pytest.mark.parametrize("kind", ["q6_k", "mxfp4"])
def test_rejects_a_scale_that_is_not_finite(tmp_path, kind):
    path = write_file(tmp_path / "model.gguf", "llama", (kind, kind, kind))
    (tensor,) = [each for each in GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight"]
    # A block of mxfp4 begins with its scale, one of q4_0 too; that of q6_k is the end of a block.
    bad = b"\xff" if kind == "mxfp4" else b"\x00\x7e"
    end = tensor.data_offset + (tensor.n_bytes if kind == "q6_k" else len(bad))
    with path.open("r+b") as file:
        file.seek(end - len(bad))
        file.write(bad)
    of_layer = r"model\.layers\.1\.mlp\.up_proj\.(scales|biases)"
    with pytest.raises(ValueError, match=f"^moe_mps::from_pretrained: {of_layer} must be finite, got NaN or"):
        load(path)


_BIAS = "block.*.layer.*.SelfAttention.relative_attention_bias.weight"  # of few columns
_OF_T5 = [f"{part}.{name}" for part in ("decoder", "encoder") for name in (_BIAS, "embed_tokens.weight")]
# Weights that stay dense: rows that are no rows of the file, and those without code of ours.
DENSE = {
    "gemma2": ["lm_head.weight"],  # tied
    "qwen2_moe": ["model.layers.*.mlp.shared_expert_gate.weight"],  # a vector
    **{"t5": _OF_T5, "umt5": _OF_T5},
}


@pytest.mark.parametrize("architecture", FIRST_LOADER)
def test_every_architecture_stays_packed(monkeypatch, architecture):
    stored, _, matrices, model = of_architecture(architecture, "q8_0")
    tensors = []
    for name, (shape, kind) in matrices.items():
        values, size = GGML_QUANT_SIZES[type_of(kind)]
        data = np.broadcast_to(np.uint8(0), (*shape[:-1], shape[-1] // values * size))
        tensors.append(gguf_file.GgufTensor(name, kind.upper(), shape, data))
    metadata = {"general.architecture": stored}
    monkeypatch.setattr(gguf_file, "read_file", lambda path: (metadata, tensors))
    file = gguf_file.GgufFile("model.gguf", model)
    found = {
        target.name + "." + parameter: file.sources(target, parameter)
        for target in quantizable(model).values()
        for parameter in target.parameters
    }
    assert sum(map(bool, found.values())) >= 3
    dense = {any_layer(name) for name, source in found.items() if not source}
    assert sorted(dense) == DENSE.get(architecture, [])
    for name in file.parts:  # what one layer has taught holds for all
        for known, learned in zip(file.order(name) or (), file.learned_order(name) or (), strict=True):
            assert np.array_equal(known, learned), name


def test_orders_of_rows_are_learned_once_for_a_class(monkeypatch):
    """A second file runs none of transformers' code, but one with other heads, whose shapes are the same."""
    learned, learn = [], gguf_file.GgufFile.learned_order
    monkeypatch.setattr(gguf_file, "_ORDERS", {})
    monkeypatch.setattr(
        gguf_file.GgufFile, "learned_order", lambda file, name: learned.append(name) or learn(file, name)
    )
    stored, _, matrices, model = of_architecture("llama", "f32")
    tensors = [
        gguf_file.GgufTensor(name, "F32", shape, np.empty((*shape[:-1], 4 * shape[-1]), np.uint8))
        for name, (shape, _) in matrices.items()
    ]
    metadata = {"general.architecture": stored}
    monkeypatch.setattr(gguf_file, "read_file", lambda path: (metadata, tensors))
    runs = []
    for heads in (2, 2, 4):
        model.config.num_attention_heads = model.config.num_key_value_heads = heads
        file = gguf_file.GgufFile("model.gguf", model)
        found = {name: file.order(name) for name in file.parts}
        # llama.cpp has the two numbers that a rotation turns beside each other in each head
        expected = np.arange(64).reshape(heads, -1, 2).swapaxes(1, 2).flatten()
        for layer, part in itertools.product(range(2), "qk"):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            assert np.array_equal(found[name].rows, expected)
        runs.append(learned.copy())
        learned.clear()
    assert len(runs[0]) == len({*map(any_layer, runs[0])}) > 5
    assert runs[1] == [] and runs[2] == runs[0]


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", [name for name in FIRST_LOADER if name != "mistral"])
def test_every_architecture_is_exact(tmp_path, architecture):
    """But for Mistral, for which transformers asks the package `gguf` by a name that is not gguf's."""
    stored, keys, matrices, _ = of_architecture(architecture, "q8_0")
    path, cls = write(tmp_path / "model.gguf", stored, keys, matrices), class_of(architecture)
    expected, found = logits(dense(path, cls=cls)), logits(load(path, cls=cls))
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


OF_BITS = [("llama", {}), ("qwen35", {}), ("qwen3moe", {"up": "q5_k"}), ("gpt-oss", {})]


@pytest.mark.parametrize(
    ("architecture", "options"),
    rows_in_sweep(OF_BITS, OF_BITS[2:3]),
)
def test_bits_quantise_again(tmp_path, architecture, options):
    """As MLX does the dequantised weights; the report has the error that was added."""
    mx = pytest.importorskip("mlx.core")
    path = write_file(tmp_path / "model.gguf", architecture, ("q4_k", "q6_k", "q5_k"), **options)
    loaded = torch_moe_mps.from_pretrained(path, bits=4, group_size=32, device_map="cpu")
    other = of_gpt_oss(path, loaded.config) if architecture == "gpt-oss" else dense(path)
    expected = {}
    for name, target in quantizable(other).items():
        for parameter in target.parameters if formats_in(loaded.get_submodule(name)) else ():
            weight = target.rows_first(getattr(target.module, parameter).detach()).contiguous()
            with mx.stream(mx.cpu):
                parts = mx.quantize(mx.array(weight.numpy()), group_size=32, bits=4)
            shapes = (slice(None) if target.kind == "experts" else 0, *[slice(None)] * 2)
            for own, part in zip(quantized_names(parameter), parts, strict=True):
                tensor = torch.from_numpy(np.array(part).view(np.int32 if own.endswith("packed") else "f4"))
                expected[f"{name}.{own}"] = tensor[shapes]
    again = torch_moe_mps.accelerate(other, bits=4, group_size=32).quantization
    for model, report in ((other, again), (loaded, loaded.hf_quantizer.report)):
        state = model.state_dict()
        assert len(expected) > 20 and all(torch.equal(state[name], t) for name, t in expected.items())
        entries = [entry for own in report.modules.values() for entry in own]
        assert entries and all(str(entry.format) == "affine4_32" and entry.error > 0 for entry in entries)
    loaded.save_pretrained(tmp_path / "saved")
    saved = torch_moe_mps.from_pretrained(tmp_path / "saved", device_map="cpu")
    assert torch.equal(logits(saved), logits(other))


def test_mistral_is_llama_by_another_name(tmp_path):
    stored, keys, matrices, _ = of_architecture("mistral", "q8_0")
    named, other = (
        write(tmp_path / f"{name}.gguf", stored, keys | {"general.name": name}, matrices)
        for name in ("mistral", "other")
    )
    model = load(named)
    assert type(model).__name__ == "MistralForCausalLM"
    assert torch.equal(logits(model), logits(load(other)))


def test_rejects_an_architecture_without_a_class(tmp_path):
    _, keys, matrices, _ = of_architecture("llama", "q8_0")
    with pytest.raises(ValueError, match=r"an architecture among afmoe, .*; got deci$"):
        load(write(tmp_path / "model.gguf", "deci", keys, matrices))


def test_a_llama_without_experts_is_llama(tmp_path):
    """Files of Llama and of Mixtral have this architecture, and the number of experts tells them apart."""
    _, keys, matrices, _ = of_architecture("llama", "q8_0")
    path = write(tmp_path / "model.gguf", "llama", keys | {"expert_count": 0}, matrices)
    assert type(load(path)).__name__ == "LlamaForCausalLM"
    experts = {f"blk.0.ffn_{name}_exps.weight": ((4, 128, 64), "q8_0") for name in ("gate", "up")}
    write(path, "llama", keys, matrices | experts)
    with pytest.raises(
        ValueError, match=r"^moe_mps::gguf: blk\.0\.ffn_gate_exps\.weight must be of a name that LlamaForC"
    ):
        load(path)


def of_gpt_oss(path, config):
    """The dense model, from the file's values as llama.cpp names and splits them."""
    values = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type)) for t in GGUFReader(path).tensors}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    names["output_norm.weight"] = "model.norm.weight"
    of_layer = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    of_layer |= {f"attn_{name}": f"self_attn.{name[0]}_proj" for name in ("q", "k", "v", "output")}
    of_layer["ffn_gate_inp"] = "mlp.router"
    state = {to: values.pop(name) for name, to in names.items()}
    for number in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"blk.{number}."): values.pop(name)
            for name in list(values)
            if name.startswith(f"blk.{number}.")
        }
        layer, experts = f"model.layers.{number}", {}
        state[f"{layer}.self_attn.sinks"] = own.pop("attn_sinks.weight")
        for end, bias in (("weight", ""), ("bias", "_bias")):
            gate, up = (own.pop(f"ffn_{part}_exps.{end}") for part in ("gate", "up"))
            both = torch.empty(len(gate), 2 * gate.shape[1], *gate.shape[2:])
            both[:, ::2], both[:, 1::2] = gate, up
            experts |= {f"gate_up_proj{bias}": both, f"down_proj{bias}": own.pop(f"ffn_down_exps.{end}")}
        for name, value in experts.items():
            state[f"{layer}.mlp.experts.{name}"] = value if name.endswith("bias") else value.mT
        for name, value in own.items():
            stem, _, end = name.partition(".")
            state[f"{layer}.{of_layer[stem].replace('output', 'o')}.{end}"] = value
    assert not values
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "kinds", [("mxfp4", "mxfp4", "q8_0"), pytest.param(("q4_k", "q6_k", "q4_0"), marks=pytest.mark.sweep)]
)
def test_gpt_oss(tmp_path, recwarn, kinds):
    """transformers reads neither its config nor its experts: gate and up alternate there, transposed."""
    path = write_file(tmp_path / "model.gguf", "gpt-oss", kinds)
    model = load(path)
    assert not [w for w in recwarn if "GGUF" in str(w.message)] and not model.hf_quantizer.report.skipped
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
    assert rope.items() <= model.config.rope_parameters.items()
    assert (model.config.sliding_window, model.config.num_experts_per_tok) == (4, 2)
    experts = {name: str(form) for name, form in formats_in(model.model.layers[1].mlp.experts).items()}
    assert experts == {"gate_up_proj": kinds[0], "down_proj": kinds[1]}
    expected, found = logits(of_gpt_oss(path, model.config)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert sum(tensor.nbytes for tensor in stored(model)) <= 1.05 * os.path.getsize(path)


def of_dbrx(path, config):
    """The dense model, from the file's values by the names of the package gguf."""
    values = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type)) for t in GGUFReader(path).tensors}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = get_tensor_name_map(MODEL_ARCH.DBRX, config.n_layers)
    state = {}
    for name, parameter in model.state_dict().items():
        value = values.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        value = value.mT if name.endswith("w2") else value
        state[name] = value.reshape(parameter.shape)
    assert not values
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("kinds", "up"),
    [
        (("q4_k", "q6_k", "q8_0"), "q4_k"),
        (("q4_0", "q5_1", "q4_k"), "q5_0"),
        (("=q4_0", "=q5_1", "q8_0"), "=q4_0"),
    ],
)
def test_dbrx(tmp_path, recwarn, kinds, up):
    """transformers does not read it; gate and up projections of one type are one stack."""
    path = write_file(tmp_path / "model.gguf", "dbrx", kinds, up=up)
    model = load(path)
    assert not [w for w in recwarn if "GGUF" in str(w.message)] and not model.hf_quantizer.report.skipped
    assert (model.config.attn_config.clip_qkv, model.config.ffn_config.moe_top_k) == (1.5, 2)
    experts = {name: str(form) for name, form in formats_in(model.transformer.blocks[1].ffn.experts).items()}
    several = {} if up == kinds[0] else {"up_proj": up}
    packed = {} if up == "=q4_0" else {"gate_up_proj": kinds[0], **several, "down_proj": kinds[1]}
    assert experts == packed
    own = of_dbrx(path, model.config)
    expected, found = logits(own), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    again = torch_moe_mps.from_pretrained(path, bits=4, group_size=32, device_map="cpu")
    torch_moe_mps.accelerate(own, bits=4, group_size=32)
    assert (logits(again) - logits(own)).abs().max() <= 2e-5 * logits(own).abs().max()


def test_names_are_looked_up_in_a_table_of_the_model_and_of_its_base(tmp_path, monkeypatch):
    """transformers makes one for each module."""
    import gguf

    made, own = [], gguf.tensor_mapping.TensorNameMap
    monkeypatch.setattr(gguf.tensor_mapping, "TensorNameMap", lambda *a: made.append(a) or own(*a))
    load(write_file(tmp_path / "model.gguf", "llama", ("q4_k", "q6_k", "q5_k")))
    assert len(made) == 2


class OfTheCpu(Memory):
    def watch(self, tensors):
        super().watch(t for t in tensors if not t.is_meta and not isinstance(t, FakeTensor))


def test_loading_takes_the_file_and_a_layer(tmp_path, monkeypatch):
    """Blocks are taken apart in pieces, here smaller ones than of a real file; one thread is counted."""
    path = write_file(tmp_path / "model.gguf", "qwen3moe", ("q4_k", "q6_k", "iq4_xs"))
    monkeypatch.setattr(quantization.gguf, "VALUES_AT_ONCE", 1 << 14)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with OfTheCpu() as memory:
        model = load(path)
    layer = sum(tensor.nbytes for tensor in stored(model.model.layers[0]))
    file = os.path.getsize(path)
    assert 0.98 * file < memory.peak <= file + 1.5 * layer


def operators_of_a_token(model) -> dict[str, int]:
    """Of a captured one."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **cache_argument(model, cache))
        for _ in range(4):
            model(IDS[:, :1], **cache_argument(model, cache))
    return operators_of_token(model)


@pytest.mark.sweep
def test_a_layer_launches_what_it_does_with_affine_weights(tmp_path, monkeypatch):
    """With values of another type, as in Q4_K_M, queries and keys still run together."""
    monkeypatch.setenv(CAPTURE, "1")
    one, two = (
        write_file(tmp_path / f"{kinds[1]}.gguf", "qwen3moe", kinds)
        for kinds in (("q4_k", "q4_k", "q4_k"), ("q4_k", "q6_k", "q4_k"))
    )
    affine = dense(one)
    torch_moe_mps.accelerate(affine, bits=4)
    counts = operators_of_a_token(affine)
    assert operators_of_a_token(load(one)) == counts
    assert operators_of_a_token(load(two)) == counts | {"linear_quantized": counts["linear_quantized"] + 2}


def test_reports_weights_that_cannot_stay_packed(tmp_path):
    """Here weights that stay in float32 in a model in float16."""
    stored, keys, matrices, _ = of_architecture("t5", "q8_0")
    path, cls = write(tmp_path / "model.gguf", stored, keys, matrices), class_of("t5")
    with pytest.warns(UserWarning, match="4 tensors of the GGUF file cannot stay packed"):
        model = load(path, cls=cls, dtype=torch.float16)
    names = [f"{part}.blk.{layer}.ffn_down.weight" for part in ("enc", "dec") for layer in (0, 1)]
    why = "q8_0, which cannot stay as it is in the model"
    assert model.hf_quantizer.report.skipped == dict.fromkeys(names, why)
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    model = load(path, cls=cls)
    assert not model.hf_quantizer.report.skipped
    expected, found = logits(dense(path, cls=cls)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_rejects_an_order_that_is_no_permutation(tmp_path):
    load(write_file(tmp_path / "model.gguf", "qwen35", ("q4_0", "q8_0", "q4_k"))).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".order"))
    tensors[name][0] = 512
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"out_proj\.order must be the numbers from 0 to 511, got others$"):
        torch_moe_mps.from_pretrained(tmp_path)


def test_rejects_a_factor_of_a_whole_tensor(tmp_path):
    """As NVFP4 files may have: transformers would leave it out."""
    stored, keys, matrices, _ = of_architecture("llama", "nvfp4")
    path = write(tmp_path / "model.gguf", stored, keys, matrices | {"blk.0.attn_q.scale": ((1,), "f32")})
    with pytest.raises(
        ValueError, match=r"^moe_mps::gguf: blk.0.attn_q.scale must be absent, for a factor of"
    ):
        load(path)


def test_rejects_types_without_values(tmp_path):
    keys, matrices = {}, {"token_embd.weight": ((96, 256), "q8_k")}
    with pytest.raises(ValueError, match=r"token_embd.weight must be of a type whose values are known"):
        gguf_file.read_file(write(tmp_path / "model.gguf", "llama", keys, matrices))[1][0].values()


# Types of ggml, enum ggml_type of llama.cpp's ggml.h (build 9993), by number; those behind a minus are of
# activations, or hold no weights.
ENUM = [
    *("f32", "f16", "q4_0", "q4_1", "-q4_2", "-q4_3", "q5_0", "q5_1", "q8_0", "-q8_1"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "-q8_k", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s"),
    *("iq4_nl", "iq3_s", "iq2_s", "iq4_xs", "-i8", "-i16", "-i32", "-i64", "f64", "iq1_m"),
    *("bf16", "-q4_0_4_4", "-q4_0_4_8", "-q4_0_8_8", "tq1_0", "tq2_0", "-iq4_nl_4_4", "-iq4_nl_4_8"),
    *("-iq4_nl_8_8", "mxfp4", "nvfp4", "q1_0", "q2_0"),
]
REFUSED = [(number, kind.strip("-")) for number, kind in enumerate(ENUM) if kind.startswith("-")]


def test_every_type_of_ggml_is_read_or_refused():
    """Blocks are packed, numbers are dense, and no number of the enum is unknown."""
    types = gguf_file.known_types()
    assert {*types, *gguf_file.REMOVED_TYPES} == {*range(len(ENUM))} and len(ENUM) == 43
    for number, kind in enumerate(ENUM):
        name, *_ = types.get(number, (gguf_file.REMOVED_TYPES.get(number),))
        assert name.lower() == kind.strip("-")
        packed = quantization.gguf.format_of_blocks(kind.strip("-")) is not None
        assert packed == (kind[0] not in "-f" and kind != "bf16"), kind


@pytest.mark.parametrize(("number", "kind"), [*REFUSED, (43, "43")])
def test_rejects_a_type_that_is_not_read_by_its_name(tmp_path, number, kind):
    is_written = kind in ("q8_1", "q8_k", "i8", "i16", "i32", "i64")
    path = write_file(tmp_path / "model.gguf", kinds=("q8_0", "q8_0", kind if is_written else "q8_0"))
    if not is_written:
        data, name = path.read_bytes(), b"blk.0.attn_q.weight"
        place = data.index(name) + len(name) + 4 + 2 * 8
        path.write_bytes(data[:place] + number.to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ValueError, match=rf"(?i)^moe_mps::gguf: [^\n]*\.weight [^\n]* {kind}\b[^\n]*$"):
        torch_moe_mps.from_pretrained(path, check=False)


@pytest.mark.sweep
def test_on_mps(simulated, tmp_path):
    path = write_file(tmp_path / "model.gguf", "qwen3moe")
    model = torch_moe_mps.from_pretrained(path, device_map="mps")
    assert model.hf_quantizer.report is not None
    expected = logits(dense(path).to("cpu"))
    assert (logits(model) - expected).abs().max() <= 2e-4 * expected.abs().max()
