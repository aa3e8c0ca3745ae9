"""What a new user tries with a quantised model: it works, or one line says what to do instead."""

import copy
import http.server
import json
import pickle
import threading

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.models import assert_close, operators_of, output, prompt, tiny
from support.processes import python

import torch_moe_mps
from torch_moe_mps.checkpoints.own.config import QuantizationConfig
from torch_moe_mps.checkpoints.source import class_for

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def quantised():
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, 4, 32, embedding_bits=6)
    return model


@pytest.fixture(scope="module")
def folder(quantised, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    quantised.save_pretrained(folder)
    return folder


@pytest.mark.sweep
def test_a_pickle_of_a_layer_imports_the_package(quantised, tmp_path):
    (tmp_path / "layer.pickle").write_bytes(pickle.dumps(quantised.model.layers[0]))
    layer = python(
        """
        import pickle, sys
        layer = pickle.load(open(sys.argv[1], "rb"))
        print(type(layer).__name__, hasattr(type(layer.self_attn), "_moe_mps_made"))
        """,
        str(tmp_path / "layer.pickle"),
    )
    assert layer == "Qwen3MoeDecoderLayer True"


def test_packed_weights_are_not_dequantised(folder):
    """transformers would tell its own developers that it is missing."""
    loaded = torch_moe_mps.from_pretrained(folder)
    with pytest.raises(NotImplementedError, match="packed weights stay packed; from_pretrained of"):
        loaded.dequantize()


@pytest.mark.sweep
def test_a_name_that_is_nowhere_is_asked_for_once(tmp_path):
    """The Hub, which is out of order here, is not tried again for half a minute."""
    asked = []

    class OutOfOrder(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *words: object) -> None:
            pass

        do_HEAD = do_GET

    with http.server.HTTPServer(("127.0.0.1", 0), OutOfOrder) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        said = python(
            """
            import torch_moe_mps
            try:
                torch_moe_mps.from_pretrained("no-such/model")
            except ValueError as error:
                print(error)
            """,
            HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}",
            HF_HUB_CACHE=str(tmp_path),
        )
        hub.shutdown()
    expected = "as a name, it is not in the Hub's cache, and the Hub cannot be reached"
    assert (
        said == f"no-such/model is no folder here; {expected}" and sum("such" in path for path in asked) == 1
    )


def test_it_loads_accelerated(folder, quantised):
    loaded = torch_moe_mps.from_pretrained(folder)
    assert operators_of(lambda: output(loaded, prompt()))["rms_norm"]
    assert_close(output(loaded, prompt()), output(quantised, prompt()), 1e-5)
    torch_moe_mps.restore(loaded)
    assert "rms_norm" not in operators_of(lambda: output(loaded, prompt()))


@pytest.mark.parametrize("order", ["quantised first", "accelerated first"])
def test_the_class_of_a_model_comes_back(order, tmp_path):
    """Its save_pretrained is of a subclass, and transformers' own class is left as it was."""
    model, save = tiny("qwen3_moe"), transformers.PreTrainedModel.save_pretrained
    cls, base = type(model), type(model.model)
    if order == "accelerated first":
        torch_moe_mps.accelerate(model)
    torch_moe_mps.accelerate(model, 4, 32)
    expected = output(model, prompt())
    assert type(model) is not cls and type(model).__name__ == cls.__name__
    torch_moe_mps.restore(model)
    assert type(model) is cls and type(model.model) is base
    assert transformers.PreTrainedModel.save_pretrained is save is cls.save_pretrained
    model.save_pretrained(tmp_path)
    assert_close(output(torch_moe_mps.from_pretrained(tmp_path), prompt()), expected, 1e-5)


def test_a_line_for_all_layers(folder):
    """In the config of the checkpoint, except for layers that differ."""
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    attention = {f"model.layers.*.self_attn.{name}_proj": "affine4_32" for name in "qkvo"}
    assert stored == {
        "library": "torch_moe_mps",
        "modules": attention
        | {"model.layers.*.mlp.experts": "affine4_32"}
        | {"model.embed_tokens": "affine6_32", "lm_head": "affine6_32"},
    }


@pytest.mark.parametrize("loaded", [False, True])
def test_no_gradients_are_asked_for(quantised, folder, loaded):
    """So that a call outside of no_grad runs, and runs on the operators."""
    model = torch_moe_mps.from_pretrained(folder) if loaded else quantised
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.enable_grad():
        counts = operators_of(lambda: model(input_ids=prompt()))
        logits = model(input_ids=prompt()).logits
    assert counts == operators_of(lambda: output(model, prompt()))
    assert_close(logits, output(quantised, prompt()), 1e-5)


def test_the_config_of_a_base_model_lists_what_is_saved(quantised, tmp_path):
    quantised.model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in stored["modules"] and "embed_tokens" in stored["modules"]
    assert not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    base = torch_moe_mps.from_pretrained(tmp_path, transformers.AutoModel)
    assert_close(output(base, prompt()), output(quantised.model, prompt()), 1e-5)
    assert "lm_head" in quantised.config.quantization_config.modules


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.Qwen3VLMoeConfig, transformers.AutoModelForImageTextToText),
        (transformers.Qwen3MoeConfig, transformers.AutoModelForCausalLM),
    ],
)
def test_a_known_type_wins_over_code_of_the_repository(config, expected):
    config = config()
    config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    assert class_for(config) is expected


def test_offloaded_buffers(quantised):
    model = copy.deepcopy(quantised)
    accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    assert_close(output(model, prompt()), output(quantised, prompt()), 1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"quantization_config": QuantizationConfig(8, 32)}], ids=["stored", "dense"]
)
def test_offloading_while_loading_is_one_line(options, folder, tmp_path):
    """Weights that stay on the disk look as if the checkpoint lacked them."""
    if options:
        tiny("qwen3_moe").save_pretrained(folder := tmp_path / "dense")
    devices = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    devices["model.rotary_emb"] = "cpu"
    with pytest.raises(
        ValueError, match="device_map must be one that offloads no quantised weights, got cpu a"
    ):
        torch_moe_mps.from_pretrained(
            folder, device_map=devices, offload_folder=tmp_path / "offloaded", **options
        )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda model: model.resize_token_embeddings(120),
            "moe_mps: a weight must be dense for .size, got a quantised one; resize, tune",
        ),
        (
            lambda model: model.lm_head.weight.requires_grad_(),
            "moe_mps: a weight must be dense for .requires",
        ),
    ],
)
def test_what_needs_dense_weights_says_so(quantised, change, error):
    with pytest.raises((ValueError, AttributeError)) as raised:
        change(copy.deepcopy(quantised))
    assert str(raised.value).startswith(error) and "\n" not in str(raised.value)


def test_the_report_sums_up():
    model = tiny("qwen3_moe")
    report = torch_moe_mps.accelerate(model, 4, 32)
    text = str(report)
    assert text.splitlines()[-1] == (
        f"{len(report.replaced)} modules run on torch_moe_mps, {len(report.left_alone)} run unmodified."
    )
    assert "MiB" not in text and "GB" not in text
