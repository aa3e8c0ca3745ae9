"""Models made of SmolLM2's trained weights: transformers' own, and a Mixture of Experts."""

import copy
import functools
from pathlib import Path
from unittest import mock

import gguf
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

QUESTION = "What is the capital of France?"


def dense(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model that transformers' own loader makes of a GGUF file."""
    options = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
    table = functools.cache(gguf.get_tensor_name_map)  # transformers makes it again for each module
    with mock.patch.object(gguf, "get_tensor_name_map", table):
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, device_map="cpu", **options)
    return model.eval()


def _with_weights(cls, config, weights: dict[str, Tensor]) -> PreTrainedModel:
    with torch.device("meta"):
        model = cls(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no checkpoint
    return model.requires_grad_(False).eval()


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of the first layers, with the same weights."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    others = tuple(f"model.layers.{i}." for i in range(count, model.config.num_hidden_layers))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith(others)}
    return _with_weights(type(model), config, weights)


def tokenizer_of(file: Path):
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def asked(tokenizer, question: str = QUESTION) -> Tensor:
    """The ids of a chat that begins with a question."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids


def mixture(model: PreTrainedModel, experts: int = 4, top_k: int = 2) -> MixtralForCausalLM:
    """A Mixture of Experts that computes what a Llama does: the MLP of a layer is each of its experts.

    Each has the elements between its matrices in another order, so that no two matrices of different experts
    fit. Routers are random, and the weights of the chosen experts sum to 1.
    """
    shared = model.config.to_dict()
    names = ("architectures", "model_type", "mlp_bias", "attention_bias", "pretraining_tp")
    config = MixtralConfig(
        **{name: value for name, value in shared.items() if name not in names},
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    generator = torch.Generator().manual_seed(0)
    weights = dict(model.state_dict())
    for layer in range(config.num_hidden_layers):
        of_layer = f"model.layers.{layer}.mlp."
        gate, up, down = (weights.pop(f"{of_layer}{name}_proj.weight") for name in ("gate", "up", "down"))
        orders = [torch.randperm(len(gate), generator=generator) for _ in range(experts)]
        router = torch.randn(experts, config.hidden_size, generator=generator) * config.hidden_size**-0.5
        weights |= {
            f"{of_layer}gate.weight": router.to(gate.dtype),
            f"{of_layer}experts.gate_up_proj": torch.stack([torch.cat((gate[o], up[o])) for o in orders]),
            f"{of_layer}experts.down_proj": torch.stack([down[:, o] for o in orders]),
        }
    result = _with_weights(MixtralForCausalLM, config, weights)
    result.generation_config = model.generation_config
    return result
