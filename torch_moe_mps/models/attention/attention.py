"""`cached_attention` for transformers' AttentionInterface: few new tokens, and prompts that need it.

A mask, a layer's window and an indexer's choice tell which keys tokens see: `Visible` is all of it, and only
`attend` makes arguments of the operator from it. Masks that only express order and window are CausalMask.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..._extension import host_library
from ..._limits import MOST_TOKENS
from ...ops._checks import ACTIVATION_DTYPES
from ...ops.families.attention import MAX_HEAD, MAX_VALUE_HEAD, WORD, seen_in_order
from ...selfcheck.units import chunks_run_sdpa
from ..basics.configs import ATTENTION, plain_config
from ..basics.state import EMPTY_STATE, STATE
from ..basics.tensors import Deferred
from ..caches.quantized_states import QuantizedStates
from ..caches.tiled_states import TiledStates
from .causal_mask import CausalMask, additive
from .latents import LazyLatents
from .visible import CHOICES, Visible, with_choice

NAME = "moe_mps"  # the implementation in place of "eager"
SDPA_HEAD = 256  # torch's attention on MPS stores the scores of a prompt where heads are wider
_SPECIAL = frozenset(("cache", "softcap", "s_aux"))  # arguments of `sdpa`, beside its usual
_ADDED = frozenset(("position_bias", "sinks"))  # arguments of `cached_attention` that the operator lacks
# Arguments of an attention function behind module, query, key, value and mask that are understood here.
_UNDERSTOOD = _SPECIAL | _ADDED | {"scaling", "dropout", "is_causal", "sliding_window"}
_added: dict[Any, frozenset[str]] = {}  # {attention function or class: what is not understood of it}
_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Scores(NamedTuple):
    """Options of the operator `cached_attention` that turn scores of keys into weights.

    Attributes:
        scaling: None for D ** -0.5.
        softcap: above 0.
        sinks: [Hq].
    """

    scaling: float | None
    softcap: float | None = None
    sinks: Tensor | None = None


def around_sdpa(original: Callable) -> Callable:
    """Our function around transformers' attention `sdpa`."""
    return functools.wraps(original)(functools.partial(_sdpa, original))


def around_sdpa_mask(original: Callable) -> Callable:
    """Our function around the mask of that."""
    return functools.wraps(original)(functools.partial(_sdpa_mask, original))


def _sdpa_mask(sdpa_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """Result of transformers' function `sdpa_mask`; on mps a CausalMask in its place.

    On a CPU only if an indexer reads it, so that it may not be None. The mask of a static cache may not be
    None either: its offset is a tensor, and a step would be compiled anew for each token's mask.
    """
    on_mps = torch.device(kwargs.get("device", "cpu")).type == "mps"
    is_read = not _may_be_none(kwargs) and not isinstance(kwargs.get("q_offset"), Tensor)
    takes = not args and (on_mps or is_read)
    mask = _causal(**{**kwargs, "dtype": torch.bool}) if takes else None
    if mask is None:
        return sdpa_mask(*args, **kwargs)
    needs_none = mask.hides_nothing or mask.is_of_first_tokens
    return None if needs_none and _may_be_none(kwargs) else mask


def _sdpa(
    sdpa: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`sdpa`, the function of transformers, or the operator for a layer that `use_attention` was given.

    On a CPU torch's attention is faster than the operator's reference, but knows no sinks, and no tiles.
    """
    if options.get("s_aux") is not None:
        return attention(module, query, key, value, attention_mask, scaling, **options)
    plain = options.get("is_causal") is not False and options.get("dropout", 0.0) == 0.0
    plain = plain and _are_none(_not_taken(sdpa, _SPECIAL), options)
    bias = options.get("position_bias")
    if bias is not None and plain and query.is_mps and getattr(module, STATE, EMPTY_STATE).is_attention:
        out = _attend_with_bias(module, query, key, value, attention_mask, bias, scaling)
        if out is not None:
            return out, None
    plain = plain and bias is None
    if isinstance(key, LazyLatents) and isinstance(value, LazyLatents):
        if plain:
            call = functools.partial(_sdpa, sdpa, module, scaling=scaling, **options)
            visible = Visible.by(attention_mask, query.shape[2])
            out = _attend_to_latents(call, query, key, attention_mask, visible, Scores(scaling))
            if out is not None:
                return out, None
        key, value = key.elements(), value.elements()
    runs = plain and query.is_mps and _is_operators(module, query, key, value, attention_mask)
    runs = runs or (plain and isinstance(key, TiledStates) and _is_causal(module))
    if runs and takes(query, key, value, attention_mask, None):
        return attend(query, key, value, Visible.by(attention_mask, query.shape[2]), Scores(scaling)), None
    mask = _elements(attention_mask)
    return sdpa(module, query, _elements(key), _elements(value), mask, scaling=scaling, **options)


def _attend_with_bias(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor,
    scaling: float | None,
) -> Tensor | None:
    """Attention of few tokens with summands [B or 1, Hq or 1, T, S] of the scores; None where sdpa runs.

    The operator's masks are the same for all queries of a key head, so each key head becomes a batch entry
    whose tokens are its queries.
    """
    (batch, heads, tokens, width), (_, key_heads, keys, _) = query.shape, key.shape
    is_first = mask is None and _is_causal(module) and tokens > 1  # tokens of a prompt
    if is_first or not _is_few(tokens) or isinstance(key, Deferred) or bias.shape[2:] != (tokens, keys):
        return None
    if mask is not None:
        mask = _elements(mask)
        hidden = torch.finfo(query.dtype).min
        bias = torch.where(mask, bias, hidden) if mask.dtype == torch.bool else bias + mask
    rows = query.reshape(batch * key_heads, 1, -1, width)
    keys_, values = (states.flatten(0, 1).unsqueeze(1) for states in (key, value))
    summands = bias.expand(batch, heads, -1, -1).reshape(batch * key_heads, 1, -1, keys)
    if not takes(rows, keys_, values, summands, None):
        return None
    out = attend(rows, keys_, values, Visible(mask=summands), Scores(scaling))
    return out.view(batch, heads, tokens, -1).transpose(1, 2)


def _is_operators(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> bool:
    """True if a layer's attention is for the operator on MPS, if that takes it."""
    if not getattr(module, STATE, EMPTY_STATE).is_attention:
        return False
    if isinstance(mask, CausalMask) and not _takes_bools(query, key, value, mask):
        return True
    return _is_causal(module) and (_is_few(query.shape[2]) or _beats_sdpa(query, key, value))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Results of `eager_attention_forward` of the module's file; its weights only where that one runs.

    A model that came with "sdpa" gets no weights, as from torch's attention.

    Args:
        module: the attention layer.
        query: [B, Hq, T, D].
        key, value: [B, Hk, S, D] and [B, Hk, S, Dv].
        attention_mask: [B, 1, T, S], True or 0 where a token sees a key, or None: a single token is the last
            of S, several are the first; each sees its own key and what lies before it, in the window. Without
            one, tokens of attention that is not causal, such as cross-attention, see all keys.
        scaling: of the scores; without it D ** -0.5.
        dropout: above 0, eager attention runs.
        options: what the layer hands on besides. Eager attention gets all but the choices:
            sliding_window: of the layer; a mask holds it already.
            s_aux: [Hq], the sinks.
            softcap: of the scores.
            indices: [B, T, K], the keys that an indexer has chosen for each token; -1 and keys that the mask
                hides count as none.
            block_indices: the blocks of keys that the module's `indexer` chooses for each token and head of
                keys: a Choice, or [B, Hk, T, K], distinct but for -1, which counts as none. A token sees what
                the mask shows of them.

    Returns: [B, T, Hq, Dv], and the attention's weights or None.

    Raises: RuntimeError where eager attention is needed and the model's file has none.
    """
    scores = Scores(scaling, options.get("softcap"), options.get("s_aux"))
    has_weights = getattr(plain_config(getattr(module, "config", None)), ATTENTION, None) != "sdpa"
    is_asked = has_weights and options.get("output_attentions")
    plain = not is_asked and _is_understood(module, dropout, options) and not _is_patched(module)

    mask, indices = attention_mask, None
    if not CHOICES.isdisjoint(options):
        by_operator = plain and takes(query, key, value, None, scores.sinks)
        mask, indices = with_choice(module, query, key, mask, options, by_operator)
        options = _without_choices(options)
    sees_all = mask is None and not _is_causal(module)
    visible = Visible.by(mask, query.shape[2], options.get("sliding_window"), sees_all, indices)

    if isinstance(key, LazyLatents) and isinstance(value, LazyLatents):
        call = functools.partial(attention, module, scaling=scaling, dropout=dropout, **options)
        out = _attend_to_latents(call, query, key, mask, visible, scores) if plain else None
        if out is not None:
            return out, None
        key, value = key.elements(), value.elements()
    if plain and takes(query, key, value, mask, scores.sinks):
        return attend(query, key, value, visible, scores), None
    key, value = _elements(key), _elements(value)
    if mask is None and not sees_all:
        key, value = _first(key, visible.seen), _first(value, visible.seen)
    shown = _shown(mask, query, key, visible, sees_all)
    options |= {"scaling": scaling, "dropout": dropout}
    out, weights = _eager_function(module)(module, query, key, value, shown, **options)
    return out, weights if has_weights else None


def _is_understood(module: nn.Module, dropout: float, options: dict[str, Any]) -> bool:
    """True if the operator takes all that a layer hands on to its attention."""
    return dropout == 0.0 and _are_none(_not_taken(module.__class__, _ADDED), options)


def _without_choices(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in CHOICES}


def _shown(mask: Any, query: Tensor, key: Tensor, visible: Visible, sees_all: bool) -> Tensor | None:
    """Additive mask of eager attention, from the visible range if none is given; None if all is visible."""
    mask, keys = _elements(mask), key.shape[2]
    if mask is None and not sees_all:
        mask = seen_in_order(query.shape[2], keys, keys, visible.window, None, query.device)
    return None if mask is None else _additive(mask, query)


def _are_none(names: frozenset[str], options: dict[str, Any]) -> bool:
    return names.isdisjoint(options) or all(options.get(name) is None for name in names)


def _not_taken(attention: Any, others: frozenset[str]) -> frozenset[str]:
    """The `others`, and arguments that a release has added to an attention function or a class's."""
    if attention not in _added:  # a dictionary: torch.compile warns of functools' caches
        function = _attention_of(attention) if isinstance(attention, type) else attention
        names = () if function is None else [*inspect.signature(function).parameters.values()][5:]
        added = {item.name for item in names if item.kind not in _COLLECTED}
        _added[attention] = frozenset(added - _UNDERSTOOD)
    return others | _added[attention]


def _attention_of(cls: type) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Attention of the file that has a layer's class, or a class beneath; None without one."""
    files = (sys.modules.get(each.__module__) for each in cls.__mro__)  # FSDP2 puts a class on top
    return next(filter(None, (getattr(file, "eager_attention_forward", None) for file in files)), None)


# torch.compile cannot look a file's names up, so it keeps the answer.
@torch.compiler.assume_constant_result
def _is_patched(module: nn.Module) -> bool:
    """True if a layer's config asks for eager attention, and its file has others' functions for that."""
    eager = _attention_of(type(module))
    asked = getattr(plain_config(getattr(module, "config", None)), ATTENTION, None)
    if asked != "eager" or eager is None:
        return False
    if not isinstance(eager, types.FunctionType):
        return True
    own, read = {cls.__module__ for cls in type(module).__mro__}, inspect.getclosurevars(eager).globals
    functions = [value for value in read.values() if isinstance(value, types.FunctionType)]
    files = (function.__globals__.get("__name__", "") for function in (eager, *functions))
    return not all(name in own or name.startswith("transformers.") for name in files)


def _eager_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The model's own attention. Raises: RuntimeError where its file has none."""
    eager = _attention_of(type(module))
    if eager is None:
        raise RuntimeError(
            f"torch_moe_mps: attention of {type(module).__name__} must be in a file with "
            "eager_attention_forward, which training and dropout need, got none"
        )
    return eager


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of NAME, an additive one; None only where eager's may be: it adds columns to its mask."""
    from ..upstream.models import eager_mask

    mask = None if args else _causal(**{"dtype": torch.float32, **kwargs})
    if mask is None:
        return eager_mask(*args, **kwargs)
    return None if mask.hides_nothing and kwargs.get("allow_is_bidirectional_skip") else mask


def _may_be_none(options: dict[str, Any]) -> bool:
    skips = options.get("allow_is_causal_skip", True), options.get("allow_is_bidirectional_skip", False)
    return any(skips)


def _causal(**options: Any) -> CausalMask | None:
    """The mask if it is one of order.

    Models whose indexers read the mask do not let it be None; this also says that others change the order.
    """
    from ..upstream.models import causal_mask_function

    plain = options.get("allow_is_causal_skip", True)
    plain = plain or options.get("mask_function") is causal_mask_function
    return CausalMask.of(**{**options, "allow_is_causal_skip": plain})


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    scores: Scores,
    dtype: str | None = None,
) -> Tensor:
    """Result of the operator `cached_attention`, [B, T, Hq, Dv] in `dtype` or the queries' dtype.

    Keys that an indexer chooses are chosen here, for some tokens of a prompt at a time.
    """
    seen, window, lookahead, key_range, mask, indices, block, choice = visible
    scaling, softcap, sinks = scores
    if choice is not None:
        outs = [
            attend(query if tokens is None else query[:, :, tokens], key, value, some, scores, dtype)
            for tokens, some in visible.chosen()
        ]
        return torch.cat(outs, 1) if len(outs) > 1 else outs[0]
    key, value = _first(key, seen), _first(value, seen)
    if isinstance(key, TiledStates) and isinstance(value, TiledStates):
        out = _attend_to_tiles(query, key, value, visible, scores, dtype)
        if out is not None:
            return out
        key, value = key.elements(), value.elements()
    asked: dict[str, Any] = {"attn_mask": mask, "window": window, "key_range": key_range}
    asked |= {"indices": indices, "index_block": block if block > 1 else None, "lookahead": lookahead or None}
    asked |= {"softcap": softcap, "sinks": sinks}
    options = {name: arguments for name, arguments in asked.items() if arguments is not None}  # host time
    if isinstance(key, QuantizedStates) and isinstance(value, QuantizedStates):
        options |= {"k_scales": key.scales, "k_zeros": key.zeros}
        options |= {"v_scales": value.scales, "v_zeros": value.zeros}
        key, value = key.packed, value.packed
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if dtype is None:
        return torch.ops.moe_mps.cached_attention(query, key, value, scale=scale, **options)
    return torch.ops.moe_mps._cached_attention(query, key, value, scale=scale, **options, dtype=dtype)


def _attend_to_tiles(
    query: Tensor, key: TiledStates, value: TiledStates, visible: Visible, scores: Scores, dtype: str | None
) -> Tensor | None:
    """Result of the operator `_tiled_attention`; None for what it lacks."""
    (_, _, tokens, width), keys, mask = query.shape, key.shape[2], visible.mask
    is_latent = value.tiles is key.tiles
    if visible.indices is not None or (visible.lookahead and tokens > 1) or not key.is_whole:
        return None
    if value.first or not (is_latent or value.is_whole):
        return None
    order: dict[str, Any] = {"key_range": visible.key_range}
    if visible.window is not None and mask is None:
        order = {}
        mask = seen_in_order(tokens, keys, keys, visible.window, visible.key_range, query.device)
    return torch.ops.moe_mps._tiled_attention(
        query,
        key.dense,
        value.dense[..., : value.shape[3]] if is_latent else value.dense,
        key.tiles,
        None if is_latent else value.tiles,
        k_bits=key.tile.bits,
        v_bits=value.tile.bits,
        position=keys - tokens,
        scale=width**-0.5 if scores.scaling is None else scores.scaling,
        attn_mask=mask,
        softcap=scores.softcap,
        sinks=scores.sinks,
        dtype=dtype,
        **order,
    )


def _attend_to_latents(
    call: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: LazyLatents,
    mask: Tensor | None,
    visible: Visible,
    scores: Scores,
) -> Tensor | None:
    """Attention to keys and values that are not expanded yet; None where all of them may be expanded.

    The operator reads the latents. If it cannot, heads are expanded and attended to a few at a time.
    """
    source, sinks = key.source, scores.sinks
    absorbed = source.absorb_query(query)
    if absorbed is not None:
        keys, values = source.keys_and_values()
        if takes(absorbed, keys, values, mask, sinks):
            if scores.scaling is None:
                scores = scores._replace(scaling=query.shape[3] ** -0.5)
            dtype = None if query.dtype == torch.float32 else "float32"
            return source.project_output(attend(absorbed, keys, values, visible, scores, dtype))
    if visible.indices is not None or (mask is not None and mask.shape[1] != 1):
        return None
    outs = []
    for heads, keys, values in source.some_heads():
        of_heads = {} if sinks is None else {"s_aux": sinks[heads]}
        outs.append(call(query[:, heads], keys, values, mask, **of_heads)[0])
    return torch.cat(outs, 2) if outs else None


def _is_causal(module: nn.Module) -> bool:
    return getattr(module, "is_causal", True) is not False


def _elements(tensor: Any) -> Any:
    return tensor.elements() if isinstance(tensor, Deferred) else tensor


def _first(states: Tensor, keys: int | None) -> Tensor:
    return states if keys is None or states.shape[2] <= keys else states[:, :, :keys]


def _is_few(tokens: int) -> bool:
    """False for a symbolic number, which torch.export would have to specialise on."""
    return tokens <= MOST_TOKENS if type(tokens) is int else statically_known_true(tokens <= MOST_TOKENS)


def _beats_sdpa(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if torch's attention on MPS would store the scores of a prompt, or keep the display waiting."""
    return query.shape[3] != value.shape[3] or query.shape[3] > SDPA_HEAD or _is_long(query, key)


def _takes_bools(query: Tensor, key: Tensor, value: Tensor, mask: CausalMask) -> bool:
    """True if torch's attention computes a chunk of a prompt, with the mask as a bool for each key. It would
    read the keys outside of a window, too, and its results are NaN for padding."""
    in_order = mask.lookahead == 0 and not mask.has_window and mask.key_range is None
    is_chunk = in_order and not _is_few(query.shape[2]) and not isinstance(key, Deferred)
    return is_chunk and chunks_run_sdpa() and not _beats_sdpa(query, key, value)


def _is_long(query: Tensor, key: Tensor) -> bool:
    """True if torch's one dispatch would take so long that macOS may stop it; the operator's is cut."""
    (batch, heads, tokens, width), keys = query.shape, key.shape[2]
    if torch.compiler.is_compiling() or host_library() is None or not type(tokens) is type(keys) is int:
        return False
    return torch.ops.moe_mps._is_long(2.0 * batch * heads * width * tokens * (keys - tokens / 2))


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> bool:
    """True if the operator computes what a call asks for."""
    tensors = (query, key, value, mask, sinks)
    return (
        query.dtype == key.dtype == value.dtype in ACTIVATION_DTYPES
        and query.shape[3] <= MAX_HEAD
        and value.shape[3] <= MAX_VALUE_HEAD
        and (mask is None or _is_plain(mask, query, key))
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))
    )


def _is_plain(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """True if a mask is the same for the heads of a key head and has a column, or a bit, for each key."""
    batches = (query.shape[0],) if isinstance(mask, CausalMask) else (1, query.shape[0])
    columns = ceil(key.shape[2] / WORD) if mask.dtype == torch.int32 else key.shape[2]
    fits = mask.dim() == 4 and mask.shape[0] in batches and mask.shape[1] in (1, key.shape[1])
    return fits and mask.shape[2:] == (query.shape[2], columns)


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """The additive mask of eager attention."""
    if mask.shape[1] > 1:  # it has heads of keys
        mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)
    return additive(mask, query.dtype) if mask.dtype == torch.bool else mask
