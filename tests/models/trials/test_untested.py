"""Behind a transformers that was not tested, a small model is compared: each test puts a fault in."""

import warnings
from importlib import metadata

import pytest
import torch
import transformers
from support import tiny_models
from support.models import output, prompt
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps import _environment, _versions
from torch_moe_mps.models.basics.report import Done
from torch_moe_mps.models.basics.state import REWRITTEN, class_before, made_as
from torch_moe_mps.models.basics.unmodified import UNMODIFIED
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.graphs.passes import PASSES
from torch_moe_mps.models.modules.rules import MODULE_RULES
from torch_moe_mps.models.trials import memory, small_models
from torch_moe_mps.models.trials import untested as trial
from torch_moe_mps.transformers import restore, supported

# Mixers of recurrent layers, whose forwards take a cache, and what gives tiny models such layers.
MIXERS = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", {}),
    "bamba": ("BambaMixer", {}),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", {}),
    "kimi_linear": ("KimiLinearDeltaAttention", {}),
    "mamba2": ("Mamba2Mixer", {}),
    "nemotron_h": ("NemotronHMamba2Mixer", {"layers_block_type": ["attention", "mamba"]}),
}


@pytest.fixture
def untested(simulated, monkeypatch, tmp_path):
    """This release was tested with another transformers, and has compared nothing yet."""
    monkeypatch.setattr(_versions, "TRANSFORMERS", ("5.0",))
    monkeypatch.setenv(_environment.CHECK, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "_known", {})
    yield tmp_path
    UNMODIFIED.clear()


def tiny(architecture: str, **overrides):
    build = tiny_models.other_model if architecture in tiny_models.other_causal() else tiny_models.tiny_model
    return build(architecture, **overrides)


def accelerated(model, **options) -> tuple[object, list[str]]:
    """The report, and the warnings of ours."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = torch_moe_mps.accelerate(model, **options)
    return report, [line for line in (str(one.message) for one in said) if line.startswith("torch_moe_mps: ")]


def runs_own(model, cls: str) -> list[bool]:
    """Of the modules of a class: whether they run their own code."""
    modules = [module for module in model.modules() if class_before(module).__name__ == cls]
    assert modules
    own = class_before(modules[0]).forward
    made = [made_as(type(module), REWRITTEN) for module in modules]
    return [each is None or each.ours is own for each in made]


@pytest.fixture
def put_rule():
    """Puts a rule in front of all others: its second argument makes the forward of modules of a class."""
    added = []

    def put(cls, change):
        def recognise(module):
            made = type(module).__name__ == cls
            return (change(type(module).forward), [Done("rms_norm")]) if made else None

        MODULE_RULES.insert(0, recognise)
        added.append(recognise)

    yield put
    for recognise in added:
        MODULE_RULES.remove(recognise)


def swallows_cache(own):
    """A forward that takes its cache for an option, which it drops."""

    def forward(self, hidden_states, *args, **options):
        names = {"past_key_values", "cache_params", "cache"}
        return own(self, hidden_states, **{name: v for name, v in options.items() if name not in names})

    return forward


@pytest.mark.slow("leaves out one class of a small model after the other")
@pytest.mark.parametrize("architecture", in_sweep(MIXERS, ("mamba2",)))
def test_a_forward_that_swallows_its_cache_is_left_out(untested, put_rule, architecture):
    cls, overrides = MIXERS[architecture]
    put_rule(cls, swallows_cache)
    model = tiny(architecture, **overrides)
    ids = prompt(1)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    report, said = accelerated(model)
    (line,) = said
    assert f"{cls} differs from its eager code (token 1 differs by" in line
    assert all(runs_own(model, cls)) and report.replaced
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)


@pytest.mark.slow("leaves out one class of a small model after the other")
def test_a_forward_that_swallows_its_mask_is_left_out(untested, put_rule):
    """Rows without padding would not show it."""

    def swallows_mask(own):
        return lambda self, x, *args, attention_mask=None, **options: own(self, x, *args, **options)

    put_rule("Qwen3MoeDecoderLayer", swallows_mask)
    model, ids = tiny("qwen3_moe"), prompt()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = output(model, ids, attention_mask=mask)
    _, (line,) = accelerated(model)
    assert "Qwen3MoeDecoderLayer differs from its eager code (a padded prompt differs by" in line
    assert torch.allclose(output(model, ids, attention_mask=mask), expected, atol=1e-5)


def test_a_tested_version_compares_nothing(simulated, monkeypatch, put_rule):
    monkeypatch.setattr(_versions, "TRANSFORMERS", ("5.0", _versions.minor(transformers.__version__)))
    monkeypatch.setenv(_environment.CHECK, "1")
    put_rule("Qwen3MoeRMSNorm", lambda own: lambda self, x: own(self, x) * 1.01)
    report, said = accelerated(tiny("qwen3_moe"))
    assert not said and report.small_model is None


@pytest.mark.slow("leaves out one class of a small model after the other")
def test_a_wrong_formula_is_left_out_and_the_verdict_is_kept(untested, put_rule, monkeypatch):
    put_rule("Qwen3MoeRMSNorm", lambda own: lambda self, x: own(self, x) * 1.01)
    state = torch.random.get_rng_state()
    model = tiny("qwen3_moe")
    expected = output(model, prompt())
    torch.random.set_rng_state(state)
    report, said = accelerated(model)
    assert torch.equal(torch.random.get_rng_state(), state) and "Qwen3MoeRMSNorm differs" in said[0]
    assert "differs from its eager code, and runs unmodified" in str(report)
    assert torch.allclose(output(model, prompt()), expected, atol=1e-5)
    monkeypatch.setattr(trial, "small_model", None)  # nothing is compared again
    again, said_again = accelerated(tiny("qwen3_moe"))
    assert said_again == said and str(again.small_model) == str(report.small_model)


def test_a_quantised_model_agrees(untested):
    with tiny_models.groups_of_32():
        model = tiny("qwen3_moe")
    accelerated(model, bits=4, group_size=32)
    memory.forget()
    report, said = accelerated(model)
    assert not said and "a small Qwen3MoeForCausalLM agrees with its eager code" in str(report)


def test_a_part_of_a_model_agrees(untested):
    """In a pipeline other processes have the other layers."""
    model = tiny("qwen3_moe")
    model.model.layers[0] = torch.nn.Identity()
    report, said = accelerated(model)
    assert not said and "a small Qwen3MoeForCausalLM agrees with its eager code" in str(report)
    restore(model)
    assert all(type(module) is class_before(module) for module in model.modules())


def test_a_change_of_the_config_is_another_verdict(untested, monkeypatch):
    compared = []
    monkeypatch.setattr(trial, "_compared", lambda model, *_: compared.append(model) or trial.Verdict())
    for changed in ({}, {}, {"norm_topk_prob": True}):
        accelerated(tiny("qwen3_moe", **changed))
    assert len(compared) == 2


def test_a_wrong_pass_leaves_tokens_module_by_module(untested):
    def raise_epsilons(graph):
        for node in graph.nodes:
            if "norm_eps" in node.kwargs:
                node.kwargs = {**node.kwargs, "norm_eps": 0.1}

    PASSES.append(raise_epsilons)
    try:
        model = tiny("llama")
        report, (line,) = accelerated(model, capture=True)
    finally:
        PASSES.remove(raise_epsilons)
    assert "captured tokens differ (token 3" in line and report.replaced and captures_of(model) is None


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_nothing_is_compared_where_nobody_wants_it(untested, put_rule, monkeypatch, how):
    put_rule("Qwen3MoeRMSNorm", lambda own: lambda self, x: own(self, x) * 1.01)
    if how == "environment":
        monkeypatch.setenv(_environment.CHECK, "0")
    model = tiny("qwen3_moe")
    report, said = accelerated(model, check=how != "argument")
    assert not said and report.small_model is None and not any(runs_own(model, "Qwen3MoeRMSNorm"))


class TestOfNoKnownSizes:
    @pytest.fixture
    def model(self):
        """Its layers lie in no list of the length that its config has."""
        model = tiny("qwen3_moe")
        model.config.num_hidden_layers = 7
        return model

    def test_keeps_its_own_code(self, untested, model):
        classes = [type(module) for module in model.modules()]
        report, (line,) = accelerated(model)
        assert "Qwen3MoeForCausalLM runs unmodified: a small model cannot be compared" in line
        assert [type(module) for module in model.modules()] == classes
        assert "it has no list of layers whose length is in its config" in str(report)

    def test_is_not_quantised(self, untested, model):
        before = dict(model.state_dict())
        with pytest.raises(RuntimeError, match="quantised experts cannot be used with transformers") as error:
            torch_moe_mps.accelerate(model, bits=4, group_size=32)
        assert "\n" not in str(error.value) and model.state_dict().keys() == before.keys()


ARCHITECTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4", "qwen3_next")


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("qwen3_next",)))
def test_small_models_have_all_kinds_of_layers(architecture):
    """Of a config as large as a real one, whose weights nobody makes."""
    config = tiny_models.model_class(architecture).config_class()
    with torch.device("meta"):
        large = tiny_models.model_class(architecture)(config)
    small = small_models.small_model(large, trial.results_of)
    assert sum(weight.numel() for weight in small.parameters()) < 3e7
    classes = [{type(module) for module in model.modules()} for model in (large, small)]
    assert classes[0] == classes[1]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("5.22.9", "torch_moe_mps: transformers must be {oldest} or newer, got 5.22.9"),
        ("5.99.0.dev0", "torch_moe_mps was tested with transformers {tested}, got 5.99.0.dev0: "),
        ("{oldest}.7", ""),
    ],
)
def test_what_it_thinks_of_a_version(monkeypatch, version, expected):
    names = {"oldest": _versions.TRANSFORMERS[0], "tested": " and ".join(_versions.TRANSFORMERS)}
    monkeypatch.setattr(metadata, "version", lambda name: version.format(**names))
    said = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            supported.require_version()
        except ImportError as error:
            said.append(str(error))
    line = "".join([*said, *(str(one.message) for one in warned)])
    assert line.startswith(expected.format(**names)) and "\n" not in line and bool(line) == bool(expected)


def test_what_transformers_lacks_is_one_line():
    """An import of ours that fails, if it was of something in transformers."""
    error = ImportError("cannot import name 'DynamicLayer'", name="transformers.cache_utils")
    line = str(supported.lacking(error))
    assert line.startswith("torch_moe_mps: transformers must have what ") and "DynamicLayer" in line
    other = ImportError("no module", name="peft")
    assert supported.lacking(other) is other
