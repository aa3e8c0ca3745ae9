"""Encoders and rerankers that `convert` has written, in sentence-transformers, compared with dense ones."""

import pytest
import torch
import transformers
from support.checkpoints import tokenizer_of
from support.tiny_models import randomise
from torch import nn

from torch_moe_mps import QuantizationConfig
from torch_moe_mps.commands import main
from torch_moe_mps.models.modules.linears import QuantizedLayer
from torch_moe_mps.quantization import QuantizedWeight, dequantize

pytestmark = pytest.mark.sweep  # importing sentence-transformers takes ten seconds

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 200, "pad_token_id": 96, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
TEXTS = ["the sky", "a", "why is the sky blue"]


def write(folder, cls: type, **more: object) -> None:
    torch.manual_seed(0)
    known = dir(cls.config_class())
    sizes = {name: size for name, size in SIZES.items() if name in known}
    model = cls(cls.config_class(**sizes | more))
    randomise(model, 0)
    model.save_pretrained(folder)
    words = tokenizer_of([*map(chr, range(32, 127)), "\n", "_"], unk_token="_", pad_token="_")
    words.save_pretrained(folder)


@torch.no_grad()
def as_stored(dense: nn.Module, quantised: nn.Module) -> int:
    """Gives a dense model the values that the other one's codes stand for. Returns: how many matrices."""
    count = 0
    for name, layer in quantised.named_modules():
        if isinstance(layer, QuantizedLayer):
            codes = layer.packed, layer.scales, layer.biases
            values = dequantize(QuantizedWeight(*codes, layer.format), torch.float32)
            dense.get_submodule(name).weight.copy_(values)
            count += 1
    return count


def both(cls: type, folder) -> list:
    """The dense model and the quantised one, loaded as docs/embeddings.md shows."""
    stored = transformers.AutoConfig.from_pretrained(folder / "four").quantization_config
    options = {"dense": {}, "four": {"quantization_config": QuantizationConfig(**stored)}}
    return [cls(str(folder / name), device="cpu", config_kwargs=each) for name, each in options.items()]


def check(dense, quantised, ask, matrices: int) -> None:
    before = ask(dense)
    assert as_stored(dense, quantised) == matrices
    expected, result = ask(dense), ask(quantised)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-4  # the codes were read


@pytest.mark.parametrize(
    ("cls", "matrices"),
    [("BertModel", 16), ("XLMRobertaModel", 16), ("ModernBertModel", 9), ("Qwen3Model", 15)],
)
def test_vectors(cls, matrices, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    write(tmp_path / "plain", getattr(transformers, cls))
    model = Transformer(str(tmp_path / "plain"))
    SentenceTransformer(modules=[model, Pooling(64, "mean"), Normalize()]).save(str(tmp_path / "dense"))
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "four"), "--bits", "4"]) == 0
    dense, four = both(SentenceTransformer, tmp_path)
    check(dense, four, lambda model: torch.tensor(model.encode(TEXTS)), matrices)


@pytest.mark.parametrize(("family", "matrices"), [("Bert", 16), ("ModernBert", 10), ("Qwen3", 15)])
def test_scores(family, matrices, tmp_path):
    from sentence_transformers import CrossEncoder

    cls = getattr(transformers, f"{family}ForSequenceClassification")
    write(tmp_path / "dense", cls, num_labels=1)
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "four"), "--bits", "4"]) == 0
    dense, four = both(CrossEncoder, tmp_path)
    pairs = [("sky", text) for text in TEXTS]
    check(dense, four, lambda model: torch.tensor(model.predict(pairs)), matrices)
