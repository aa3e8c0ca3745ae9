"""RecurrentGemma's recurrent blocks.

The model's own code keeps the states of a block in its attributes, so that a model has one conversation at a
time, and a call changes it. Here the layer of the cache has them, as in other models with linear attention;
where the own code has to run, it finds them in the attributes, and they go back to the cache behind it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import original_class, with_own
from ...basics.uncommitted import uncommitted_of
from ...caches.deferred_states import DeferredLayer
from ...modules.experts import is_observed
from ...modules.rules.recurrent_layers import CONVOLUTION, convolved, scan
from ...trials.comparing import agrees
from ...trials.forms import Tried
from ...trials.twins import LinearCache, twin_of
from ...upstream.models import LinearAttentionCacheLayerMixin

ops = torch.ops.moe_mps
_CHILDREN = "linear_y", "linear_x", "linear_out", "conv_1d", "rg_lru"
# Attributes of a block and of its RG-LRU that have the states of the own code.
_CONV, _RECURRENT = "conv1d_state", "recurrent_states"


def number_blocks(model: nn.Module) -> None:
    """Tells recurrent blocks the number of their layer, which attention of the same model knows.

    It is transformers' attribute for it, and stays when the model is restored.
    """
    for module in model.modules():
        layers = module._modules.get("layers")
        for number, layer in enumerate(layers if isinstance(layers, nn.ModuleList) else ()):
            block: Any = layer._modules.get("temporal_block")
            if block is not None and _is_candidate(block):
                block.layer_idx = number


def _is_candidate(module: nn.Module) -> bool:
    return all(name in module._modules for name in _CHILDREN) and hasattr(module, _CONV)


def _has_place(cache: Any, number: int) -> bool:
    """Whether a layer of a cache holds states; one that was made without a config has none for them."""
    layers = [] if cache is None else cache.layers
    return number < len(layers) and isinstance(layers[number], LinearAttentionCacheLayerMixin)


def own_block(
    block: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Any,
    use_cache: bool = True,
    cache: Any = None,
) -> Any:
    """The block's own code, with the states of the cache where that has a place for them."""
    number = block.layer_idx
    if not (use_cache and _has_place(cache, number)):
        return NotImplemented
    unit, layer = block.rg_lru, cache.layers[number]
    held = cache.get_conv_state(number)
    block.conv1d_state = None if held is None else held[..., 1:]
    unit.recurrent_states = cache.get_recurrent_state(number)
    try:
        result = original_class(block).forward(block, input_states, position_ids, attention_mask, use_cache)
        conv, recurrent = F.pad(block.conv1d_state, (1, 0)), unit.recurrent_states
    finally:
        block.conv1d_state = unit.recurrent_states = None
    if held is None or isinstance(layer, DeferredLayer):  # the latter refuses it
        cache.update_conv_state(conv, number, conv_kernel_size=conv.shape[-1])
        cache.update_recurrent_state(recurrent, number)
    # New tensors: a backward may still need the states before.
    layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent
    return result


@with_own(own_block)
def recurrent_block(
    block: Any,
    input_states: Tensor,
    position_ids: Tensor | None,
    attention_mask: Any = None,
    use_cache: bool = True,
    cache: Any = None,
) -> tuple[Tensor, None]:
    """The forward of a rewritten block. Without positions no token begins anew."""
    unit, number = block.rg_lru, block.layer_idx
    cache = cache if use_cache and _has_place(cache, number) else None
    if (use_cache and cache is None) or is_observed(block.conv_1d, unit):
        return NotImplemented
    mixed = convolved(block.conv_1d, "none", block.linear_x(input_states), cache, number)
    of_heads = mixed.unflatten(-1, (unit.num_attention_heads, unit.block_width))
    gates = [
        ops.heads_mm(of_heads, weight, transposed=True).flatten(2)
        for weight in (unit.input_gate_weight, unit.recurrent_gate_weight)
    ]
    branch = block.act_fn(block.linear_y(input_states))
    out = scan(
        cache,
        number,
        (mixed.shape[0], mixed.shape[2]),
        mixed,
        lambda state: ops.rg_lru_(
            mixed,
            *gates,
            state,
            unit.recurrent_param,
            positions=None if position_ids is None else position_ids.expand(mixed.shape[:2]),
            input_bias=unit.input_gate_bias.view(-1),
            decay_bias=unit.recurrent_gate_bias.view(-1),
            branch=branch,
            **uncommitted_of(state, mixed.shape[1]),
        ),
    )
    return block.linear_out(out), None


def _may_be(module: nn.Module) -> bool:
    """Whether a module is a candidate, and the number of its layer is known."""
    return _is_candidate(module) and hasattr(module, "layer_idx")


def _is_same(module: nn.Module, forward: Callable) -> bool:
    """Whether a forward gives the results and the states of a block's own."""
    twin = twin_of(module, layer_idx=0, conv1d_state=None)
    twin.rg_lru.recurrent_states = None
    x = torch.randn(2, 8, twin.linear_x.in_features)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    chunks = [slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 8)]
    own, cache = copy.deepcopy(twin), LinearCache()
    theirs, ours = [], []
    for piece in chunks:
        arguments = x[:, piece], places[:, piece], None
        theirs.append(original_class(module).forward(own, *arguments)[0])
        ours.append(forward(twin, *arguments, cache=cache)[0])
    theirs += [own.conv1d_state, own.rg_lru.recurrent_states]
    ours += [cache.layers[0].conv_states[0][..., 1:], cache.layers[0].recurrent_states[0]]
    theirs.append(original_class(module).forward(own, x, places, None, use_cache=False)[0])
    ours.append(forward(twin, x, places, None, use_cache=False)[0])
    return agrees(ours, theirs, 1e-3)


block = Tried(
    _may_be,
    recurrent_block,
    _is_same,
    (Done(CONVOLUTION), Done("heads_mm"), Done("rg_lru_")),
    apart=(_CONV, _RECURRENT),
)
