"""LoRA of PEFT over packed linears and experts, against PEFT's own on dense models with the same values."""

import copy
import functools
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import gguf_files, tiny_models
from support.models import eager, generate, output, prompt, tiny
from support.processes import forked
from support.sweep import covering
from torch import nn

import torch_moe_mps

transformers.logging.set_verbosity_error()
ATTENTION = nn.functional.scaled_dot_product_attention
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
BOTH = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}


@functools.cache
def made(architecture: str) -> tuple[nn.Module, nn.Module]:
    dense = tiny(architecture)
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32, linear_bits=4)
    return packed, tiny_models.dense_twin(dense, packed)


def both(architecture: str = "qwen3_moe") -> tuple[nn.Module, nn.Module]:
    """A packed model, and the dense one with its values."""
    packed, dense = made(architecture)
    return copy.deepcopy(packed), copy.deepcopy(dense)


def adapted(model: nn.Module, seed: int = 0, **options: Any) -> peft.PeftModel:
    torch.manual_seed(seed)
    config = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | (options or BOTH)
    return peft.get_peft_model(model, peft.LoraConfig(**config)).eval()


def close(result: torch.Tensor, right: torch.Tensor, tolerance: float = 5e-6) -> None:
    assert (result.double() - right.double()).norm() <= tolerance * right.double().norm()


@torch.no_grad()
def test_autocast_computes_as_peft():
    """In autocast's dtype, as PEFT does over a linear layer; what is packed is zero, which adds nothing."""
    packed, dense = both("llama")
    layers = []
    for model in (packed, dense):
        own = model.model.layers[0].self_attn.q_proj
        for tensor in (own.scales, own.biases) if model is packed else (own.weight,):
            tensor.zero_()
        layers.append(
            adapted(model, target_modules=["q_proj"]).base_model.model.model.layers[0].self_attn.q_proj
        )
    x = torch.randn(3, layers[0].in_features, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        result, right = (layer(x) for layer in layers)
    assert result.dtype == right.dtype == torch.bfloat16 and torch.equal(result, right)


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids).logits.double()
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def errors_of(model: nn.Module, right: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, float]:
    """How far each gradient is from that in float64, beside its norm; those of queries with one key are 0, up
    to what rounding leaves of gradients as large as the others."""
    found = gradients(model, ids)
    assert found.keys() == right.keys() and len(right) >= 8
    kept = {name: each for name, each in right.items() if each.norm() > 1e-12}
    rounding = 1e-6 * max(each.norm() for each in kept.values())
    assert all(found[name].norm() < rounding for name in right.keys() - kept.keys())
    return {n: ((found[n] - each).norm() / each.norm()).item() for n, each in kept.items()}


def assert_same_gradients(packed: nn.Module, dense: nn.Module, ids: torch.Tensor) -> None:
    """At most 5e-6 from float64, or 1.2 times the most that the dense model in float32 is off: gradients of
    queries cancel in attention's backward, which is torch's in both."""
    right = gradients(copy.deepcopy(dense).double(), ids)
    ours, own = (errors_of(model, right, ids) for model in (packed, dense))
    assert max(ours.values()) <= max(5e-6, 1.2 * max(own.values())), (ours, own)


def wide_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
    """torch's attention in float64."""
    mask = options.pop("attn_mask", None)
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    return ATTENTION(q.double(), k.double(), v.double(), *args, attn_mask=mask, **options).to(q.dtype)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_gradients(architecture):
    packed, dense = (adapted(model) for model in both(architecture))
    close(output(packed, prompt()), output(dense, prompt()))
    assert_same_gradients(packed, dense, prompt())
    assert_same_gradients(packed, dense, prompt()[:1, :1])  # one token, most experts without one


def test_an_adapter_stays_trainable():
    """Of layers that stay dense, in a model whose experts are quantised then."""
    dense = tiny("qwen3_moe")
    ours = adapted(copy.deepcopy(dense), target_modules=["q_proj"])
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    torch_moe_mps.accelerate(ours, 4, 32, linear_bits=None, embedding_bits=None)
    assert {name for name, parameter in ours.named_parameters() if parameter.requires_grad} == trained
    own = tiny_models.dense_twin(adapted(dense, target_modules=["q_proj"]), ours)
    assert_close_gradients(ours, own)


def assert_close_gradients(ours: nn.Module, dense: nn.Module) -> None:
    found, right = (gradients(model, prompt()) for model in (ours, dense))
    assert found.keys() == right.keys() and found
    for name, gradient in right.items():
        close(found[name], gradient, 1e-5)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4", "longcat_flash"])
def test_gradients_of_dense_experts(architecture):
    """Not in training, so that nothing but the factors says that gradients are needed."""
    dense = tiny(architecture)
    ours = copy.deepcopy(dense)
    torch_moe_mps.accelerate(ours)
    ours, dense = (adapted(model, target_parameters=EXPERTS) for model in (ours, dense))
    assert_close_gradients(ours, dense)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("architecture", ["llama4", "longcat_flash"])
def test_an_adapter_of_the_plain_model(architecture, is_packed, tmp_path):
    """Llama 4's stacks are [E, input, output], which PEFT is not told; LongCat's first one has matrices that
    no forward reads. Adapters of these go from the plain model to the accelerated one, and back."""
    packed, plain = both(architecture)
    if not is_packed:
        packed = copy.deepcopy(plain)
        torch_moe_mps.accelerate(packed)
    for number, (first, second) in enumerate(((plain, packed), (packed, plain))):
        first, second = copy.deepcopy(first), copy.deepcopy(second)
        trained = adapted(first, seed=number, target_parameters=EXPERTS)
        trained.save_pretrained(tmp_path / str(number))
        loaded = peft.PeftModel.from_pretrained(second, tmp_path / str(number), is_trainable=True).eval()
        right = output(trained, prompt())
        assert (right - output(plain, prompt())).norm() > 0.01 * right.norm()
        close(output(loaded, prompt()), right)
    assert_close_gradients(trained, loaded)


def errors(model: nn.Module, right: dict[str, torch.Tensor]) -> float:
    """How far all gradients of a model are from those in float64, beside their norm."""
    found = gradients(model, prompt())
    off = sum((found[name].double() - each).square().sum() for name, each in right.items())
    return float((off / sum(each.square().sum() for each in right.values())).sqrt())


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_gradients_in_bfloat16(architecture):
    """At most 1.2 times as far from float64 as those of the dense model in bfloat16."""
    options = BOTH if architecture == "qwen3_moe" else {"target_modules": ["q_proj", "down_proj"]}
    packed, dense = both(architecture)
    tiny_models.dense_twin(dense, packed.bfloat16().float())  # of rounded scales, without rounding the values
    packed, dense = adapted(packed, **options).bfloat16(), adapted(dense, **options)
    dense.load_state_dict(packed.state_dict(), strict=False)  # norms and adapters, rounded
    right = gradients(copy.deepcopy(dense).double(), prompt())
    own = errors(dense.bfloat16(), right)
    assert 1e-3 < own < 0.2 and errors(packed, right) <= 1.2 * own


def test_over_gguf(tmp_path, monkeypatch):
    """With attention in float64 no gradient is further off than 8e-6; with torch's in float32 that of a
    query is, in the dense model, too."""
    kinds = ("q4_k", "q6_k", "q5_k")
    path = gguf_files.write_file(
        tmp_path / "model.gguf", "qwen3moe", kinds, up="q5_k"
    )  # gate and up are two matrices
    options = {"gguf_file": path.name, "device_map": "cpu"}
    packed = torch_moe_mps.from_pretrained(str(path.parent), **options)
    packed, dense = adapted(packed), adapted(eager(gguf_files.dense(path)))
    ids = torch.arange(1, 9)[None]
    assert_same_gradients(packed, dense, ids)
    right = gradients(copy.deepcopy(dense).double(), ids)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", wide_attention)
    assert max(errors_of(packed, right, ids).values()) <= 8e-6


def test_saved_as_peft_saves_and_back(tmp_path):
    packed, dense = (adapted(model) for model in both())
    for name, model in (("packed", packed), ("dense", dense)):
        model.save_pretrained(tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("packed", "dense"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].is_contiguous() for key in theirs)
    again, other = both()
    on_dense = peft.PeftModel.from_pretrained(other, tmp_path / "packed").eval()
    on_packed = peft.PeftModel.from_pretrained(again, tmp_path / "dense").eval()
    assert torch.equal(output(on_dense, prompt()), output(dense, prompt()))
    assert torch.equal(output(on_packed, prompt()), output(packed, prompt()))


def by_column(model: nn.Module) -> list[bool]:
    factors = [p for name, p in model.named_parameters() if "experts" in name and "lora_B" in name]
    return [factor.stride() == (1, len(factor)) for factor in factors]


def test_columns_of_an_expert_lie_together(tmp_path):
    """After loading on either road, in another dtype, in a copy, and where a state is assigned."""
    packed, _ = both()
    before = {name: {*vars(module)} for name, module in packed.named_modules() if name.endswith("experts")}
    held = {name: packed.get_submodule(name) for name in before}
    model = adapted(packed)
    assert all({*vars(held[name])} == before[name] for name in before)
    assert all(by_column(model)) and len(by_column(model)) == 4
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())  # as safetensors wants it
    model.save_pretrained(tmp_path)
    for is_lean in (False, True):
        loaded = peft.PeftModel.from_pretrained(both()[0], tmp_path, low_cpu_mem_usage=is_lean)
        assert all(by_column(loaded))
    assert all(by_column(copy.deepcopy(model).to(torch.bfloat16)))
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert all(by_column(model))


def test_several_are_switched_and_disabled():
    models = [adapted(model) for model in both()]
    tokens: list[list[torch.Tensor]] = []
    for model in models:
        torch.manual_seed(1)
        model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, **BOTH))
        written = []
        for name in ("default", "second", "default"):
            model.set_adapter(name)
            written.append(generate(model, prompt()))
        with model.disable_adapter():
            written.append(generate(model, prompt()))
        model.base_model.set_adapter(["default", "second"])
        written.append(output(model, prompt()))
        tokens.append(written)
    packed, dense = tokens
    close(packed.pop(), dense.pop())
    for result, right in zip(packed, dense, strict=True):
        assert torch.equal(result, right)
    assert torch.equal(packed[0], packed[2])
    assert len({tuple(each.flatten().tolist()) for each in packed}) == 3


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")  # xdist would import PEFT to show it
@pytest.mark.parametrize("options", [{"r": 257}, {"lora_bias": True}])
def test_ranks_and_biases_beyond_the_operator_match_peft(options):
    """A rank above its bound, and a bias behind the second factor, are PEFT's own sums."""
    packed, dense = (
        adapted(model, target_modules=["q_proj", "o_proj"], **options) for model in both("llama")
    )
    for model in (packed, dense):
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and name.endswith("bias"):
                nn.init.normal_(parameter)
    close(output(packed, prompt()), output(dense, prompt()))


@torch.no_grad()
def test_rows_with_adapters_of_their_own():
    results = []
    for model in both("llama"):
        several = adapted(model, target_modules=["q_proj", "o_proj"])
        ids = prompt()[:1].expand(2, -1)
        results.append(several(input_ids=ids, adapter_names=["default", "__base__"]).logits)
    close(*results)
    assert (results[0][0] - results[0][1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "recipe", "tied"),
    covering(("llama", "qwen3_moe"), ({"mode": "mxfp4"}, {"bits": 4, "group_size": 32}), (True, False)),
)
def test_parameters_are_counted_as_of_the_dense_model(architecture, recipe, tied, tmp_path):
    """By PEFT, whatever was done to the packed model before."""
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model(architecture, tie_word_embeddings=tied))
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, keep=["k_proj"], **recipe)
    torch_moe_mps.accelerate(packed, **recipe)  # the rest
    packed.save_pretrained(tmp_path)
    loaded = torch_moe_mps.from_pretrained(tmp_path, type(dense))
    assert loaded.load_state_dict(packed.state_dict())
    experts = {"target_parameters": ["experts.down_proj"]} if architecture == "qwen3_moe" else {}
    models = (
        dense,
        packed,
        copy.deepcopy(loaded).to(torch.bfloat16),
        torch_moe_mps.restore(loaded) or loaded,
    )
    counts = [
        adapted(model, target_modules=["q_proj"], **experts).get_nb_trainable_parameters() for model in models
    ]
    assert counts == [counts[0]] * 4


def test_all_linear():
    names, chosen = [], []
    for model in both():
        first = adapted(model, target_modules="all-linear")
        assert first.peft_config["default"].target_modules
        first.add_adapter("second", peft.LoraConfig(target_modules="all-linear", r=2))
        names.append([name for name, module in first.named_modules() if hasattr(module, "lora_A")])
        assert all("second" in first.get_submodule(name).lora_A for name in names[-1])
        chosen.append(first.peft_config["second"].target_modules)
    assert names[0] == names[1] and chosen[0] == chosen[1]
    assert not any("lm_head" in name for name in names[0])


class Losses(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []


@pytest.mark.parametrize("reentrant", [None, False], ids=["whole", "checkpointed"])
def test_trainer(tmp_path, reentrant):
    """Steps of transformers' Trainer follow those of the dense model."""
    rows = torch.randint(1, 90, (8, 6), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    checkpointing = {"gradient_checkpointing": reentrant is not None}
    if reentrant is not None:
        checkpointing["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    curves = []
    for model in both():
        losses = Losses()
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path, max_steps=8, per_device_train_batch_size=4, learning_rate=5e-3,
            report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
            **checkpointing,
        )  # fmt: skip
        transformers.Trainer(adapted(model), arguments, train_dataset=data, callbacks=[losses]).train()
        curves.append(losses.losses)
    packed, dense = curves
    assert len(dense) == 8 and dense[-1] < dense[0] - 0.3
    assert max(abs(a - b) for a, b in zip(packed, dense, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"use_dora": True}, "use_dora( over a quantised weight must be False|=True)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights over a quantised weight must be True, False or"),
        ({"lora_dropout": 0.1}, "lora_dropout != 0"),
    ],
)
def test_refused_options(option, message):
    for target in ({"target_modules": ["q_proj"]}, {"target_parameters": EXPERTS}):
        if "lora_dropout" in option and "target_modules" in target:
            continue  # linear layers have it
        with pytest.raises(ValueError, match=message):
            adapted(both()[0], **target, **option)


WHOLE = [
    ({"modules_to_save": ["lm_head"]}, "lm_head"),
    ({"modules_to_save": ["mlp"]}, "model.layers.0.mlp"),
    ({"trainable_token_indices": [1, 2]}, "model.embed_tokens"),
]


@pytest.mark.parametrize(("option", "name"), WHOLE)
def test_modules_that_are_trained_whole_must_be_dense(option, name, tmp_path):
    """An adapter of the dense model that has some is refused in one line, and loads where they stay dense."""
    dense = adapted(tiny("qwen3_moe"), target_modules=["q_proj"], **option)
    with torch.no_grad():
        for each in (each for each in dense.parameters() if each.requires_grad):
            each.add_(torch.randn_like(each), alpha=0.05)
    dense.save_pretrained(tmp_path)
    packed, before = both()[0], output(both()[0], prompt())
    only = rf"{next(iter(option))} must be of dense modules \(keep=\['{name}'\] loads this one dense\)"
    with pytest.raises(ValueError, match=f"^moe_mps: {only}, got {name}, which is quantised$"):
        peft.PeftModel.from_pretrained(packed, tmp_path)
    assert torch.equal(output(packed, prompt()), before)
    kept = tiny("qwen3_moe")
    torch_moe_mps.accelerate(kept, 4, 32, linear_bits=4, keep=[f"*{name.replace('.0.', '.*.')}*"])
    twin = tiny_models.dense_twin(tiny("qwen3_moe"), kept)
    result, right = (peft.PeftModel.from_pretrained(each, tmp_path).eval() for each in (kept, twin))
    close(output(result, prompt()), output(right, prompt()))


def test_ranks_of_experts():
    with pytest.raises(ValueError, match="r over quantised experts must be at most 256, got 257"):
        adapted(both()[0], target_parameters=EXPERTS, r=257)


@pytest.mark.parametrize("target", [{"target_modules": ["q_proj"]}, {"target_parameters": EXPERTS}])
def test_merging_is_refused(target):
    model = adapted(both()[0], **target)
    with pytest.raises(ValueError, match="an adapter must be over a dense weight to be merged"):
        model.merge_adapter()


LIVES = """
import copy, gc, importlib.metadata, pickle, sys
if {version!r}:
    own = importlib.metadata.version
    importlib.metadata.version = lambda name: {version!r} if name == "peft" else own(name)
import torch, torch_moe_mps.transformers
from torch_moe_mps.quantization import quantize
from torch_moe_mps.models.modules.linears import QuantizedLinear
print("peft" in sys.modules)
layer = QuantizedLinear(quantize(torch.randn(8, 32), 4, 32, "affine"), torch.float32)
from peft.tuners.tuners_utils import BaseTuner
is_ours = lambda: hasattr(BaseTuner.inject_adapter, "__wrapped__")
copied, stored = copy.deepcopy(layer), pickle.dumps(layer._reach)
print(is_ours())
del layer
gc.collect()
print(is_ours())
del copied
gc.collect()
print(is_ours())
again = pickle.loads(stored)
print(is_ours())
"""


@pytest.mark.parametrize(("version", "during"), [("", True), ("0.99.0", False)])
def test_peft_is_its_own_without_packed_weights(version, during):
    """A function of PEFT is replaced from the first packed layer to the last copy; not of another version."""
    assert forked(LIVES.format(version=version)).split() == [
        str(each) for each in (False, during, during, False, during)
    ]
