"""A tiny model with linear attention, its layer, and its decode step."""

import torch

from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

from . import tiny_models
from .models import eager, prompt


def model_of(architecture: str = "qwen3_next", dtype: torch.dtype = torch.float32):
    """With gates that are not the same for every head."""
    model = eager(tiny_models.tiny_model(architecture, dtype))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight")):
            parameter.data = (torch.rand(parameter.shape, generator=generator) + 0.5).to(parameter.dtype)
    return model


def layer_of(model) -> torch.nn.Module:
    return next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))


def decoded(model, tokens: int = 4, batch: int = 2) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a prompt and of tokens one by one, and the states of the first layer behind them."""
    ids = prompt(batch)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        cache, logits = cache_among(out), [out.logits]
        for token in range(tokens):
            ids = torch.full((batch, 1), 5 + token)
            logits.append(model(input_ids=ids, **cache_argument(model, cache), use_cache=True).logits)
    layer = cache.layers[0]
    return torch.cat(logits, 1), [layer.conv_states[0], layer.recurrent_states[0]]


def step(model):
    """A call that runs the linear attention for one more token."""
    with torch.no_grad():
        cache = cache_among(model(input_ids=prompt(1).to(model.device), use_cache=True))
    layer = layer_of(model)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 1, model.config.get_text_config().hidden_size, generator=generator)
    x = x.to(model.device, model.dtype)

    def run():
        with torch.no_grad():
            return layer(x, **cache_argument(layer, cache))

    return run
