"""A model whose layers are spread over two processes gives what it gives in one, bit for bit."""

import functools

import pytest
from support import tiny_models
from support.pipeline import cases_of, launch
from support.sweep import rows_in_sweep
from transformers.distributed import DistributedConfig

from torch_moe_mps.checkpoints.own.config import QuantizationConfig
from torch_moe_mps.checkpoints.quantizer import Quantizer

# Layers that read the ids; sinks and windows.
ALWAYS = (
    ("qwen3_moe", "quantised while it is read"),
    ("deepseek_v4", "quantised"),
    ("gpt_oss", "quantised, captured"),
)
# A stage without attention; a vision tower; layers that hand on indices beside hidden states. Below all
# architectures.
OTHERS = (
    ("qwen3_moe", "mlx"),
    ("qwen3_next", "quantised"),
    ("qwen3_vl_moe", "quantised"),
    ("glm_moe_dsa", "quantised, captured"),
)
WANTED = rows_in_sweep(ALWAYS + OTHERS, ALWAYS)
CAPTURED = rows_in_sweep((ALWAYS[-1], OTHERS[-1]), ALWAYS)
CANNOT = {"inkling2", "diffusion_gemma", "muse_spark", "openai_privacy_filter", "qwen3_omni_moe"}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    @functools.cache
    def outcomes_of(pairs):
        return launch("equal", str(tmp_path_factory.mktemp("pipeline")), pairs)

    return outcomes_of


@pytest.fixture
def outcomes(launched, architecture, form):
    return launched(ALWAYS if (architecture, form) in ALWAYS else OTHERS)


@pytest.mark.parametrize(("architecture", "form"), WANTED)
def test_two_processes_give_what_one_gives(outcomes, architecture, form):
    for outcome in outcomes:
        cases = outcome[f"{architecture}, {form}"]["cases"]
        assert cases == dict.fromkeys(cases_of(architecture, form), "equal")


@pytest.mark.parametrize(("architecture", "form"), CAPTURED)
def test_a_token_of_a_stage_is_one_call(outcomes, architecture, form):
    """Above it gives the same bits as tokens that are not captured, in one process."""
    for outcome in outcomes:
        assert outcome[f"{architecture}, {form}"]["tokens"].startswith("a token is one call")


@pytest.mark.parametrize(("architecture", "form"), WANTED)
def test_a_process_holds_its_own_layers_only(outcomes, architecture, form):
    first, last = (outcome[f"{architecture}, {form}"] for outcome in outcomes)
    whole = first["all"]
    layers = [{n for n in part["parameters"] if ".layers." in n} for part in (first, last)]
    assert not layers[0] & layers[1] and all(layers)
    assert layers[0] | layers[1] == {n for n in whole if ".layers." in n}
    both = first["parameters"].keys() & last["parameters"].keys()
    tied = {name for name in both if "embed_tokens" in name}  # with the output head
    assert sum(whole[name] for name in both - tied) < 0.02 * sum(whole.values())  # norms
    assert {**first["parameters"], **last["parameters"]} == whole


def test_quantised_weights_split_over_processes_are_refused(tmp_path):
    """transformers' tensor and expert parallelism."""
    model = tiny_models.tiny_model("qwen3_moe")
    quantizer = Quantizer(QuantizationConfig(4, 32))
    model.config.distributed_config = DistributedConfig(tp_size=2, ep_size=2)
    with pytest.raises(ValueError, match="tp_size and ep_size must be 1 for quantised weights"):
        quantizer.update_parallel_plan(model, {})


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
def test_every_architecture(part, tmp_path):
    forms = dict.fromkeys(tiny_models.DENSE_ARCHITECTURES, "dense") | dict.fromkeys(
        tiny_models.architectures(), "quantised"
    )
    wanted = [[name, form] for name, form in forms.items()][part::10]
    for outcome in launch("equal", str(tmp_path), wanted):
        for name, form in wanted:
            found = outcome[f"{name}, {form}"]
            assert ("refused" in found) == (name in CANNOT), (name, found)
            assert set(found["cases"].values()) <= {"equal", "does not run in one process"}, (name, found)
            assert name in CANNOT or found["cases"]["plain"] == "equal"
