"""Files that llama.cpp's own tool writes of trained weights, in every type that we read."""

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from support import trained, trained_models
from support.llama_cpp import check_log_probabilities, run, tools

import torch_moe_mps
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.quantization.gguf import format_of_blocks

TYPES = [kind.name.lower() for kind in GGMLQuantizationType if format_of_blocks(kind.name)]
# Names of the file: those of the model. Rows of queries and keys move, which other tests have.
NAMES = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
NAMES |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A function that writes SmolLM2 in a mixture of types, with importance, and loads it."""
    source, folder = trained.smollm2(), tmp_path_factory.mktemp("llama.cpp")
    if source is None:
        pytest.skip(trained.MISSING)
    (folder / "text").write_text(SAMPLE.read_text()[:6000])
    importance, file = folder / "imatrix.gguf", folder / "model.gguf"
    run(tools() / "llama-imatrix", "-m", source, "-f", folder / "text", "-o", importance, "-c", 512)

    def write(mixture, *options):
        how = ("--allow-requantize", "--imatrix", importance, *options)
        run(tools() / "llama-quantize", *how, source, file, mixture)
        return file, torch_moe_mps.from_pretrained(str(file), dtype=torch.float32, device_map="cpu")

    return write


def ids_of_question():
    return trained_models.asked(trained_models.tokenizer_of(trained.smollm2()))


def test_every_type(quantised):
    """A layer's down projection in each: values are those of the package gguf, the model is llama.cpp's.

    The package knows the name of Q1_0 alone, whose values test_gguf.py has.
    """
    layers = [f"blk\\.{i}\\.ffn_down={kind}" for i, kind in enumerate(TYPES)]
    file, model = quantised("Q4_0", *(part for layer in layers for part in ("--tensor-type", layer)))
    found = {}
    for tensor in GGUFReader(file).tensors:
        *layer, name, _ = tensor.name.removeprefix("blk.").split(".")
        if name not in NAMES and name != "token_embd":
            continue
        if name == "ffn_down":
            found[int(layer[0])] = tensor.tensor_type.name.lower()
        if tensor.tensor_type is GGMLQuantizationType.Q1_0:
            continue
        path = f"layers.{layer[0]}.{NAMES[name]}" if layer else "embed_tokens"
        rows = slice(None) if layer else slice(64)
        expected = dequantize(tensor.data[rows], tensor.tensor_type)
        module = model.model.get_submodule(path)
        assert torch.equal(module.dequantized(rows), torch.from_numpy(expected)), (
            tensor.name,
            tensor.tensor_type,
        )
    assert [found[i] for i in range(len(TYPES))] == TYPES
    check_log_probabilities(file, model, ids_of_question())


@pytest.mark.parametrize("mixture", ["Q3_K_S", "Q4_K_M", "IQ2_M"])
def test_mixtures(quantised, mixture):
    check_log_probabilities(*quantised(mixture), ids_of_question())
