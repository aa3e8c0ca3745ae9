"""What a module's own code reads may change in an accelerated model: that is followed, or refused."""

import copy

import pytest
import torch
from support import tiny_models
from support.code_reads import OF_CLASS, Tracer, change_of_global, changes, is_fixed
from support.models import assert_close, output, prompt, tiny
from support.sweep import in_sweep
from torch import nn

import torch_moe_mps
from torch_moe_mps.models.basics.interface import recognised_code
from torch_moe_mps.models.basics.state import class_before, state_in
from torch_moe_mps.models.basics.unmodified import all_operators
from torch_moe_mps.transformers import is_experts


def pair(architecture: str, bits: int | None):
    own = tiny(architecture)
    fast = copy.deepcopy(own)
    torch_moe_mps.accelerate(fast, bits, bits and 32)
    return fast, tiny_models.dense_twin(own, fast)


def on_instance(path: str, name: str, made):
    """Gives a module a method of its own, which does something else with the result of its class's."""

    def change(model):
        module = model.get_submodule(path)
        own = getattr(module, name)
        setattr(module, name, lambda *args: made(*own(*args)) if made is routed else made(own(*args)))

    return change


def routed(weights, ids):
    return 2 * weights, ids


def twice(result):
    return 2 * result


def doubled(module, args, result):
    return tuple(2 * each for each in result) if isinstance(result, tuple) else 2 * result


def hook(path: str):
    return lambda model: model.get_submodule(path).register_forward_hook(doubled)


def set_to(path: str, name: str, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def class_on_top(path: str):
    def change(model):
        module = model.get_submodule(path)
        cls = type(module)
        forward = lambda self, *args, **kwargs: 2 * cls.forward(self, *args, **kwargs)  # noqa: E731
        module.__class__ = type(cls.__name__, (cls,), {"forward": forward})

    return change


DBRX, JETMOE = "transformer.blocks.0.ffn", "model.layers.0.mlp"
LLAMA4, STEP3P7 = "model.layers.0.feed_forward", "model.language_model.layers.0.mlp.experts"
LONGCAT = "model.layers.0.mlp"
REFUSED = "packed \\w+ must compute what they did when they were packed"
# (architecture, change, whether packed experts follow it, too)
CHANGES = {
    "Llama 4: top_k": ("llama4", set_to(f"{LLAMA4}.router", "top_k", 2), True),
    "Llama 4: a class on its experts": ("llama4", class_on_top(f"{LLAMA4}.experts"), True),
    "DBRX: method of an instance": ("dbrx", on_instance(DBRX, "route_tokens_to_experts", routed), True),
    "DBRX: activation": ("dbrx", set_to(f"{DBRX}.experts.mlp", "activation_fn", nn.Tanh()), True),
    "DBRX: hook of the matrices": ("dbrx", hook(f"{DBRX}.experts.mlp"), False),
    "JetMoE: activation": ("jetmoe", set_to(JETMOE, "activation", nn.Tanh()), True),
    "JetMoE: top_k": ("jetmoe", set_to(f"{JETMOE}.router", "top_k", 3), False),
    "JetMoE: hook of a stack": ("jetmoe", hook(f"{JETMOE}.output_linear"), False),
    "Step-3.7: method of an instance": ("step3p7", on_instance(STEP3P7, "_apply_gate", twice), True),
    "LongCat: identity": ("longcat_flash", hook(f"{LONGCAT}.experts.identity_expert"), False),
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change(name, bits):
    architecture, change, is_followed = CHANGES[name]
    fast, own = pair(architecture, bits)
    before = output(own, prompt())
    for model in (fast, own):
        change(model)
    expected = output(own, prompt())
    assert (expected - before).abs().max() > 1e-3
    if bits is None or is_followed:
        assert_close(output(fast, prompt()), expected, 1e-5)
    else:
        with pytest.raises(ValueError, match=REFUSED):
            output(fast, prompt())


@pytest.mark.parametrize("name", ["has_bias", "has_gate", "is_transposed"])
@torch.no_grad()
def test_packed_experts_say_what_their_weights_are(name):
    fast, _ = pair("gpt_oss", 4)
    before, experts = output(fast, prompt()), fast.model.layers[0].mlp.experts
    value = getattr(experts, name)
    setattr(experts, name, not value)
    with pytest.raises(ValueError, match=f"{REFUSED}, got {name}={not value}"):
        output(fast, prompt())
    setattr(experts, name, value)
    assert torch.equal(output(fast, prompt()), before)


@pytest.mark.parametrize("name", ["eager_attention_forward", "repeat_kv"])
@torch.no_grad()
def test_another_eager_attention_of_a_file(name, monkeypatch):
    """It runs in the place of ours, which stands for eager attention where torch's lacks sinks."""
    fast, own = pair("gpt_oss", None)
    before, file = output(own, prompt()), tiny_models.modelling("gpt_oss")
    assert_close(output(fast, prompt()), before, 1e-5)
    function = getattr(file, name)
    monkeypatch.setattr(file, name, lambda *args, **options: doubled(None, args, function(*args, **options)))
    expected = output(own, prompt())
    assert (expected - before).abs().max() > 1e-3
    assert_close(output(fast, prompt()), expected, 1e-5)


# Everything that is read


def reads_of(fast, own):
    """{path of a recognised module: its (path, names) that code reads}, and (file, name) of all of them.

    The first of each class. Raises: AssertionError for what the tracer has seen, and the record has not.
    """
    with Tracer() as tracer:
        output(own, prompt(1, 5))
    paths = {module: name for name, module in own.named_modules()}
    found, classes = {}, set()
    files = {key: file for key, file in tracer.names.items() if file["__name__"].startswith(MODELS)}
    for path, module in fast.named_modules():
        guards = state_in(module).guards
        cls = class_before(module)
        if not guards or not guards.parts or cls in classes:
            continue
        classes.add(cls)
        of_fast = {id(each): name for name, each in fast.named_modules()}
        parts = {of_fast[id(part)]: names for part, _, _, names, _ in guards.parts if id(part) in of_fast}
        recorded = {(place, (name,)) for place, names in parts.items() for name in names}
        traced = {
            (name, names)
            for (owner, names), below in tracer.attributes.items()
            if (name := paths.get(owner)) in parts and own.get_submodule(path) in below
        }
        first = {(name, names[:1]) for name, names in traced}
        missed = {
            (name, (each,))
            for name, (each,) in first - recorded
            if each not in UNREAD and is_of_model(own.get_submodule(name)) and not runs_ours(path, name, fast)
        }
        assert not missed, f"{path} rests on {sorted(recorded)}, its code reads {sorted(missed)}, too"
        found[path] = recorded | {(name, names) for name, names in traced if len(names) == 2}
        files |= {(id(held), name): held for held, name, *_ in guards.reads if "__name__" in held}
    return found, {key: file for key, file in files.items() if not is_fixed(file)}


MODELS = "transformers.models."
EAGER = "eager_attention_forward"  # ours runs it for masks of single heads, torch's attention never does
UNREAD = {"forward", "training"}  # modules are called, and their mode is looked at in each call


def is_of_model(module) -> bool:
    return not class_before(module).__module__.startswith(("torch.", "torch_moe_mps."))


def runs_ours(path: str, name: str, fast) -> bool:
    """True for experts with transformers' interface: its contract says what an implementation reads."""
    module = fast.get_submodule(path)
    return is_experts(module) and recognised_code(module) is None and name == path


def result_of(model, ids):
    torch.manual_seed(0)  # for dropout
    try:
        return output(model, ids)
    except Exception as error:
        return error


def check_each_change(architecture: str, bits: int | None) -> tuple[int, int, list[str]]:
    """(how many reads, how many changes, what was ignored)"""
    fast, own = pair(architecture, bits)
    own.set_experts_implementation("batched_mm")  # it reads what the interface of experts has
    ids, wrong, count = prompt(1, 5), [], 0
    before = output(own, ids)
    assert is_close(output(fast, ids), before)
    reads, files = reads_of(fast, own)
    rows = [(f"{path}: {place}.{'.'.join(names)}", change)
            for path, of_module in reads.items() for place, names in sorted(of_module)
            if names != ("layer_idx",)  # two modules with one would share a layer of a cache: all change
            for change in changes(own, place, names)]  # fmt: skip
    rows.append(("layer_idx", ("of all layers", turn_layers)))
    runs_eager = own.config.get_text_config()._attn_implementation == "eager"
    for (_, name), file in files.items():
        if name == EAGER and not runs_eager:
            continue
        if name in file and (change := change_of_global(file, name)) is not None:
            rows.append((f"{file['__name__']}.{name}", ("global", change)))
    for what, (kind, change) in rows:
        count += 1
        undo = []
        try:
            for model in (own,) if kind in ("global", OF_CLASS) else (own, fast):
                undo.append(change(model))
            expected, found = result_of(own, ids), result_of(fast, ids)
        except (AttributeError, KeyError):  # the packed model has it elsewhere
            continue
        finally:
            for back in reversed(undo):
                back()
        if isinstance(found, Exception):
            fits = isinstance(expected, Exception) or (bits and "moe_mps::" in str(found))
        else:
            fits = is_close(found, expected if isinstance(expected, torch.Tensor) else before)
            fits = fits == isinstance(expected, torch.Tensor)  # an error elsewhere of the own code alone
        if not fits:
            wrong.append(f"{what} ({kind}): {described(found, expected)}")
    assert is_close(output(fast, ids), output(own, ids))
    return sum(map(len, reads.values())) + len(files), count, wrong


def turn_layers(model):
    """Lets the layers have each other's layers of a cache: the last one the first. Returns what undoes it."""
    layers = [module for module in model.modules() if isinstance(vars(module).get("layer_idx"), int)]
    last = max((module.layer_idx for module in layers), default=0)

    def turn():
        for module in layers:
            module.layer_idx = last - module.layer_idx

    turn()
    return turn


def described(found, expected) -> str:
    """A difference, for the message of the test."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return f"{(found - expected).abs().max():.1e} of {expected.abs().max():.1e}"
    return " and ".join(
        "logits" if isinstance(each, torch.Tensor) else repr(each)[:99] for each in (found, expected)
    )


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = expected.abs().nan_to_num(0).max().item()
    return torch.allclose(found, expected, 1e-4, 1e-4 * largest, equal_nan=True)


# With these, each kind of recognised module is changed in each run.
ALWAYS = ["llama4", "dbrx", "longcat_flash"]
EVERY = [
    *dict.fromkeys([*tiny_models.architectures(), "llama4", "dbrx", "jetmoe", "step3p7", "longcat_flash"])
]


@pytest.mark.slow("makes about a hundred changes")
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("architecture", in_sweep(EVERY, ALWAYS))
@torch.no_grad()
def test_whatever_code_reads(architecture, bits):
    with all_operators():
        reads, made, ignored = check_each_change(architecture, bits)
    assert reads and made and not ignored, ignored
