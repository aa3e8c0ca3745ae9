"""Attention with sinks for transformers' AttentionInterface: few new tokens by the operator."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._checks import ACTIVATION_DTYPES
from ..ops.attention import MAX_HEAD, MAX_VALUE_HEAD
from .rewriting.record import record_of

NAME = "moe_mps_sinks"  # of the attention implementation
MOST_TOKENS = 8  # of a call of the operator; longer inputs are prompts


def use_attention_of_sinks(model: nn.Module) -> list[str]:
    """Lets the attention layers that have sinks run on the operator, where they run their model's own code.

    Returns: the names of these layers.
    """
    names = []
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        has_sinks = isinstance(getattr(module, "sinks", None), Tensor) and getattr(module, "is_causal", False)
        implementation = getattr(config, "_attn_implementation", None)
        if has_sinks and implementation in ("eager", NAME):
            record_of(module).previous.setdefault("_attn_implementation", (config, "eager"))
            config._attn_implementation = NAME
            names.append(name)
    return names


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `eager_attention_forward` of the module's file returns, its weights only where that runs.

    Args:
        module: the attention layer.
        query: [B, Hq, T, D].
        key, value: [B, Hk, S, D] and [B, Hk, S, Dv].
        attention_mask: [B, 1, T, S], True or 0 where a token sees a key, or None: a token sees its own key
            and what lies before it, in the sliding window.
        scaling: of the scores; without it D ** -0.5.
        dropout, kwargs: for the model's own code, which runs where dropout is asked for.
        sliding_window: of the layer; a mask holds it already.
        s_aux: [Hq], the sinks.

    Returns: [B, T, Hq, Dv], and the attention's weights or None.

    Raises: RuntimeError where the model's own code is needed and its file has none.
    """
    if _takes(query, key, value, attention_mask, s_aux, dropout, kwargs):
        window = sliding_window if attention_mask is None else None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        operator = torch.ops.moe_mps.attention
        out = operator(query, key, value, scale, mask=attention_mask, window=window, sinks=s_aux)
        return out, None
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)  # FSDP2 puts a class on top
    functions = (getattr(file, "eager_attention_forward", None) for file in files)
    eager = next(filter(None, functions), None)
    if eager is None:
        raise RuntimeError(
            f"torch_moe_mps: attention of {type(module).__name__} must be in a file with "
            "eager_attention_forward, which prompts, training and dropout need, got none"
        )
    return eager(
        module,
        query,
        key,
        value,
        _additive(attention_mask, query, key, sliding_window),
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        s_aux=s_aux,
        **kwargs,
    )


def attention_mask(
    *args: Any, q_length: int, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """The mask for `attention`: None for one new token that sees the whole cache, else an additive one."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    if q_length == 1 and allow_is_causal_skip:
        plain = {name: value for name, value in kwargs.items() if name != "dtype"}
        if sdpa_mask(*args, q_length=q_length, allow_is_causal_skip=True, **plain) is None:
            return None
    return eager_mask(*args, q_length=q_length, **kwargs)


def _takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the operator computes what a call asks for."""
    tensors = [t for t in (query, key, value, mask, sinks) if t is not None]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    plain = query.dtype == key.dtype == value.dtype in ACTIVATION_DTYPES
    return (
        query.shape[2] <= MOST_TOKENS
        and query.shape[3] <= MAX_HEAD
        and value.shape[3] <= MAX_VALUE_HEAD
        and plain
        and dropout == 0.0
        and not needs_grad
        and not kwargs.get("output_attentions")
        and (mask is None or (mask.dim() == 4 and mask.shape[1] == 1))
    )


def _additive(mask: Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """The mask in the form that a model's own code adds to the scores."""
    tokens, keys = query.shape[2], key.shape[2]
    if mask is None:
        new = torch.arange(keys - tokens, keys, device=query.device)
        distance = new[:, None] - torch.arange(keys, device=query.device)
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        mask = mask[None, None]
    if mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)
