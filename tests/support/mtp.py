"""Checkpoints with MTP layers further tokens, named as their makers name them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from support import tiny_models
from support.checkpoints import changed

_OF_QWEN = ("mellum", "qwen3_next", "qwen3_5", "qwen3_5_moe")  # makers that name them so
_NAMES_OF_QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


@contextmanager
def with_mtp(architecture: str, folder: Path, layers: int = 1, **more) -> Iterator[type]:
    """Writes a model of two layers, of these sizes, and MTP layers behind them.

    Yields: the class of the model; within the block transformers knows where these layers are, as it does in
    the models that their makers published.
    """
    sizes: dict = {"num_mtp_layers": layers}
    if architecture == "mellum":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        sizes |= {"layer_types": kinds, "sliding_window": 6, "mlp_layer_types": ["sparse"] * 3}
    elif architecture in _OF_QWEN:  # their configs do not say how many there are
        sizes = {"layer_types": ["linear_attention", *["full_attention"] * (1 + layers)]}
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model(architecture, num_hidden_layers=2 + layers, **sizes | more)
    model.save_pretrained(folder)
    weights, width = load_file(folder / "model.safetensors"), model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    for layer in range(2, 2 + layers):
        name = f"model.layers.{layer}"
        weights[f"{name}.eh_proj.weight"] = torch.randn(width, 2 * width, generator=generator) / 8
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{name}.{norm}.weight"] = torch.rand(width, generator=generator) + 0.5
    if architecture in _OF_QWEN:
        weights = {_of_qwen(name): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with changed(folder / "config.json") as config:
        config["num_hidden_layers"] = 2
        for name in ("layer_types", "mlp_layer_types"):
            if config.get(name):
                config[name] = config[name][:2]
    with pytest.MonkeyPatch.context() as patch:
        names = [rf"model\.layers\.{layer}\..*" for layer in range(2, 2 + layers)]
        names = [r"^mtp\."] if architecture in _OF_QWEN else names
        patch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", names)
        yield type(model)


def _of_qwen(name: str) -> str:
    inside = name.removeprefix("model.layers.2.")
    if inside == name:
        return name
    part = inside.removesuffix(".weight")
    return f"mtp.{_NAMES_OF_QWEN[part]}.weight" if part in _NAMES_OF_QWEN else f"mtp.layers.0.{inside}"


@torch.no_grad()
def drafted(model, layers, tokens: list[int], count: int) -> list[int]:
    """What layers of transformers draft behind some tokens, each from its first place on, without a cache.

    Behind their own drafts, the last one goes on from its states.
    """
    ids = torch.tensor([tokens])
    states = model(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
    inputs, found = states, []
    for number in range(count):
        layer = min(number, len(layers.layers) - 1)
        # Behind the last layer: each place that it has read, and its own drafts.
        inputs = torch.cat((inputs, states[:, -1:]), 1) if number > layer else states
        taken = torch.tensor([[*tokens, *found][layer + 1 :]])
        places = torch.arange(layer + 1, layer + 1 + taken.shape[1])[None]
        cache = MtpCache(config=layers.config)
        states = layers.forward_layer(layer, inputs, places, cache, input_ids=taken)
        found.append(int(layers._project_to_logits(states[:, -1:]).argmax()))
    return found
