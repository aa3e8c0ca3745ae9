"""Whole layers of linear attention: Kimi's delta attention, Mamba-2, Mamba-1, and what families add.

A layer is recognised by its results: its own forward and the one here run on a replica of it, for a prompt,
a token behind it and a few more, and have to give the same results and states of the cache.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.state import eager_of, original_class, with_eager
from ...basics.tensors import uncommitted_of
from ...trials.comparing import agrees
from ...trials.draws import eager, normal
from ...trials.forms import Tried
from ...trials.replicas import LinearCache, replica_of, width_of
from ...upstream.calls import in_place, needed_arguments
from .gated_delta_rule import ACTIVATIONS

ops = torch.ops.moe_mps
SCAN, CONVOLUTION = "_gated_delta_rule_", "causal_conv1d_update_"


# Parts that the forwards have in common


def _in_a_row(owner: nn.Module, names: Sequence[str], x: Tensor) -> Tensor:
    """Pass x through the layers that a module has of these, one behind the other."""
    for layer in (owner._modules[name] for name in names if name in owner._modules):
        x = layer(x)  # type: ignore[misc]  # none of them is None
    return x


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, C] without the tokens that a mask hides, whose last T columns are for these."""
    return x if mask is None else (x * mask[:, -x.shape[1] :, None]).to(x.dtype)


def is_seen(layer: nn.Module) -> bool:
    """True if hooks see the modules in a layer, which the operators do not call."""
    gate = layer._modules.get("forget_gate")
    within: Any = () if gate is None else gate._modules.values()
    return is_observed(*layer._modules.values(), *within)  # type: ignore[arg-type]  # none of them is None


def convolution(layer: Any, x: Tensor, cache: Any) -> Tensor:
    """activation(conv1d(x)) of [B, T, C], and the state of the cache."""
    number, weight, bias = layer.layer_idx, layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    state = None if cache is None else cache.get_conv_state(number)
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], weight.shape[1])
        if cache is not None:
            cache.update_conv_state(state, number, conv_kernel_size=weight.shape[1])
            state = cache.get_conv_state(number)
    pending = uncommitted_of(state, x.shape[1])
    return ops.causal_conv1d_update_(
        x, state, weight, bias, activation=ACTIVATIONS[layer.activation], **pending
    )


def scan(
    cache: Any,
    number: int,
    shape: tuple[int, ...],
    x: Tensor,
    run: Callable[[Tensor], Tensor],
) -> Tensor:
    """run(state), and the state that it leaves in the cache."""
    cached = None if cache is None else cache.get_recurrent_state(number)
    state = torch.zeros(shape, dtype=torch.float32, device=x.device) if cached is None else cached
    out = run(state)
    if cache is not None and cached is None:
        cache.update_recurrent_state(state, number)
    return out


def layer_forward(run: Callable) -> Callable:
    """The forward of a layer. `run` gets the input without what a mask hides, the cache and the mask."""

    def forward(layer: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Tensor:
        is_recording = cache is not None and getattr(cache, "is_recording_past", bool)(layer.layer_idx)
        if is_recording or is_seen(layer):
            return NotImplemented
        return run(layer, masked(hidden_states, attention_mask), cache, attention_mask)

    return forward


# The layers


@layer_forward
def channel_layer(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    """Kimi's delta attention: a decay for each channel of the keys."""
    heads, width, forget = layer.num_heads, layer.head_dim, layer.forget_gate
    mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    g = _in_a_row(forget, ("f_a_proj", "f_b_proj", "f_proj"), x)
    z = _in_a_row(layer, ("g_a_proj", "g_b_proj", "g_proj"), x)
    of_heads = (*x.shape[:2], heads, width)
    q, k, v = (part.view(of_heads) for part in convolution(layer, mixed, cache).chunk(3, -1))
    bound = getattr(forget, "safe_gate_lower_bound", getattr(forget, "lower_bound", None))
    if getattr(forget, "safe_gate", True) is False:
        bound = None
    out = scan(
        cache,
        layer.layer_idx,
        (x.shape[0], heads, width, width),
        x,
        lambda state: ops._gated_delta_rule_(
            *(q, k, v, g.view(of_heads), state),
            scale=width**-0.5,
            beta=layer.b_proj(x),
            l2norm_eps=1e-6,
            decay_form="softplus" if bound is None else "sigmoid",
            A_log=forget.A_log.view(-1),
            dt_bias=forget.dt_bias.view(heads, width),
            lower_bound=bound,
            beta_activation="sigmoid",
            gate=z.view(of_heads),
            gate_activation="sigmoid",
            norm_weight=layer.o_norm.weight,
            norm_eps=layer.o_norm.variance_epsilon,
            **uncommitted_of(state, x.shape[1]),
        ),
    )
    return layer.o_proj(out.flatten(2))


def mamba_scan(layer: Any, projected: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results of the heads of Mamba-2, [B, T, C], and its gate, from the first projection's."""
    heads, width, groups, states = layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size
    inner, tokens = heads * width, projected.shape[:2]
    gate, mixed, step = projected.split_with_sizes([inner, inner + 2 * groups * states, heads], -1)
    before = None if cache is None else cache.get_conv_state(layer.layer_idx)
    # Uncommitted tokens may be drafts, each of them a step.
    is_step = before is not None and (tokens[1] == 1 or bool(uncommitted_of(before, tokens[1])))
    mixed = masked(convolution(layer, mixed, cache), mask)
    v, k, q = mixed.split_with_sizes([inner, groups * states, groups * states], -1)
    least = 0.0 if is_step else layer.time_step_limit[0]  # the model's step has no limit
    out = scan(
        cache,
        layer.layer_idx,
        (tokens[0], heads, width, states),
        projected,
        lambda state: ops._gated_delta_rule_(
            q.view(*tokens, groups, states),
            k.view(*tokens, groups, states),
            v.view(*tokens, heads, width),
            None,
            state.mT,
            scale=1.0,
            beta=step,
            decay_form="times_beta",
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            beta_activation="softplus",
            beta_min=least or None,
            skip=layer.D,
            **uncommitted_of(state, tokens[1]),
        ),
    )
    return out.flatten(2), gate


@layer_forward
def mamba_layer(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    """Mamba-2."""
    out, gate = mamba_scan(layer, layer.in_proj(x), cache, mask)
    gated, options = (
        layer.norm,
        {"activation": "silu", "gate_first": True, "group_size": layer.norm.group_size},
    )
    out = ops.rms_norm_gated(out, gate, gated.weight, norm_eps=gated.variance_epsilon, **options)
    return layer.out_proj(out)


def own_selective_layer(
    layer: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None
) -> Any:
    """Eager code of Mamba-1, a token at a time where a cache has a state: several tokens forget it."""
    if cache is None or cache.get_recurrent_state(layer.layer_idx) is None:
        return NotImplemented
    eager_forward, tokens = original_class(layer).forward, hidden_states.split(1, 1)
    masks = [None] * len(tokens) if attention_mask is None else attention_mask[:, -len(tokens) :].split(1, 1)
    arguments = needed_arguments(eager_forward, cache)
    results = [
        eager_forward(layer, token, **arguments | {"attention_mask": mask})
        for token, mask in zip(tokens, masks, strict=True)
    ]
    return torch.cat(results, 1)


@with_eager(own_selective_layer)
@layer_forward
def selective_layer(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    """Mamba-1, which goes on from the state of a cache for any number of tokens."""
    states = layer.ssm_state_size
    mixed, gate = layer.in_proj(x).chunk(2, -1)
    mixed = masked(convolution(layer, mixed, cache), mask)
    parts = layer.x_proj(mixed).split_with_sizes([layer.time_step_rank, states, states], -1)
    norms = map(layer._modules.get, ("dt_layernorm", "b_layernorm", "c_layernorm"))
    step, b, c = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
    step = F.linear(step, layer.dt_proj.weight)
    options = {"dt_bias": layer.dt_proj.bias, "skip": layer.D, "gate": gate}
    out = scan(
        cache,
        layer.layer_idx,
        (*mixed.shape[::2], states),
        x,
        lambda state: ops.selective_scan_(
            mixed, step, b, c, state, layer.A_log, **options, **uncommitted_of(state, x.shape[1])
        ),
    )
    return layer.out_proj(out)


def lightning_layer(
    layer: Any, x: Tensor, position_embeddings: Any = None, attention_mask: Any = None, cache: Any = None
) -> tuple[Tensor, Tensor]:
    """Lightning attention: a constant decay a head."""
    heads, width = layer.num_attention_heads, layer.head_dim
    if is_seen(layer):
        return NotImplemented
    mixed, gate = layer.qkv_proj(x), layer.output_gate(x)
    mixed = masked(layer.act_fn(mixed), attention_mask).unflatten(-1, (heads, 3 * width))
    cached = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    shape = x.shape[0], heads, width, width
    state = torch.zeros(shape, device=x.device) if cached is None else cached.float()
    q, k, v = mixed.split_with_sizes([width] * 3, -1)
    form: Any = {"decay_form": "times_beta", "A_log": layer.slope_rate.view(-1).log()}  # steps of 1
    form |= {"beta": x.new_ones(*x.shape[:2], heads), **uncommitted_of(state, x.shape[1])}
    out, norm = ops._gated_delta_rule_(q, k, v, None, state, scale=1.0, **form).flatten(2), layer.norm
    out = ops.rms_norm_gated(out, gate, norm.weight, norm_eps=norm.variance_epsilon, activation="sigmoid")
    if cache is not None and cached is not state:
        cache.set_linear_cache(layer.layer_idx, state)
    # The next token changes the cache's memory, which a record of this call must not share.
    return layer.out_proj(out), state.clone() if is_observed(layer) else state


_DECAYS = "query_decay", "key_decay", "diagonal_decay"  # buffers of lightning attention


def _has_decays_of_rates(layer: Any) -> bool:
    """True if the decays of blocks are what eager code makes of the rates, which alone are read here."""
    expected, found = layer.decay_factors(layer.slope_rate), (getattr(layer, name) for name in _DECAYS)
    atol = 1e-5 if layer.slope_rate.dtype == torch.float32 else 1e-2
    return all(torch.allclose(a, b, 0.0, atol) for a, b in zip(found, expected, strict=True))


def _with_decays_of_rates(layer: Any) -> Any:
    """A replica with decays of its own rates."""
    replica = replica_of(layer)
    for name, decay in zip(_DECAYS, replica.decay_factors(replica.slope_rate), strict=True):
        setattr(replica, name, decay)
    return replica


# Recognising them


def recurrent_layer(
    children: Sequence[str],
    forward: Callable,
    *operators: str,
    fits: Callable[[Any], bool] = lambda layer: True,
    make_replica: Callable[[Any], Any] = replica_of,
) -> Tried:
    """A rule for whole layers of linear attention, which all have children of these names.

    Args:
        fits: layer -> False if what `make_replica` derives does not hold for it.
    """

    def may_be(module: nn.Module) -> bool:
        has_children = all(name in module._modules for name in children)
        return has_children and not any(buffer.is_meta for buffer in module.buffers()) and fits(module)

    trial = functools.partial(matches_module, make_replica)
    return Tried(may_be, forward, trial, tuple(map(Done, operators)))


def matches_module(make_replica: Callable[[Any], Any], module: nn.Module, forward: Callable) -> bool:
    """True if a forward gives the results and the states of the module's eager code."""
    replica = make_replica(module)
    eager_forward = original_class(module).forward
    x = normal(
        1, 9, width_of(replica, lambda x: eager_forward(replica, x, **needed_arguments(eager_forward, None)))
    )
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])
    found = []
    for run in (
        eager(in_place(eager_forward, eager_of(forward) or eager_forward)),
        in_place(eager_forward, forward),
    ):
        copied, cache, results = copy.deepcopy(replica), LinearCache(layer_idx=replica.layer_idx), []
        chunks = (
            (x[:, :5], mask, None),
            (x[:, :5], mask, cache),
            (x[:, 5:6], None, cache),
            (x[:, 6:], None, cache),
        )
        for piece, own_mask, states in chunks:
            arguments = needed_arguments(eager_forward, states) | {"attention_mask": own_mask}
            results.append(run(copied, piece, **arguments))
        outs = [result[0] if isinstance(result, tuple) else result for result in results]
        found.append([*outs, *cache.states()])
    theirs, ours = found
    return len(ours) > 4 and agrees(ours, theirs, 1e-3)


with_channels = recurrent_layer(
    ("conv1d", "forget_gate", "b_proj", "o_norm"), channel_layer, CONVOLUTION, SCAN
)
mamba = recurrent_layer(
    ("in_proj", "conv1d", "norm", "out_proj"), mamba_layer, CONVOLUTION, SCAN, "rms_norm_gated"
)
selective = recurrent_layer(
    ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"), selective_layer, CONVOLUTION, "selective_scan_"
)
lightning = recurrent_layer(
    ("qkv_proj", "output_gate", "norm", "out_proj"), lightning_layer, SCAN, "rms_norm_gated",
    fits=_has_decays_of_rates, make_replica=_with_decays_of_rates,
)  # fmt: skip
