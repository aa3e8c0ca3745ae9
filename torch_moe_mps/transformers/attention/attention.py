"""The operator `attention` for transformers' AttentionInterface: few new tokens, and prompts that need it.

Models that run torch's attention keep the implementation "sdpa": its function asks each module whether it is
accelerated. torch's attention knows neither sinks nor soft caps: models with them change from "eager" to an
implementation of this package. Masks that only express order and window are CausalMask.
"""

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..._extension import host_library
from ...ops._checks import ACTIVATION_DTYPES
from ...ops.attention import CACHE_BITS, MAX_HEAD, MAX_VALUE_HEAD, WORD, seen_in_order
from ..basics.deferred import Deferred
from ..basics.state import NOTHING, STATE, original_class, state_of
from ..caches.quantized_states import QuantizedStates
from .causal_mask import CausalMask, additive
from .chosen_keys import Choice, ChosenMask
from .indexer import IN_ORDER
from .latents import MOST_TOKENS as MOST_OF_LATENTS
from .latents import Promised

NAME = "moe_mps"  # the implementation in place of "eager"
_IMPLEMENTATION = "_attn_implementation"  # the attribute of a config that names it
MOST_TOKENS = 8  # new ones; a call with more is a prompt
_ALL_KEYS = torch.iinfo(torch.int32).max  # a look-ahead
SDPA_HEAD = 256  # torch's attention on MPS stores the scores of a prompt where heads are wider
KV_BITS = (CACHE_BITS, 16)  # of keys and values in a cache; in 16 they are as the model makes them
_AT_ONCE = 1024  # tokens whose indices become bits
_CHOICE = frozenset(("indices", "block_indices"))  # of keys, which `attention` takes
LAYER_HOOKS: list[Callable[[nn.Module], None]] = []  # called with each layer that the operator runs
NEEDS_OUR_KERNEL: list[Callable[[nn.Module], bool]] = []  # whether a layer runs NAME in place of "eager"
_SPECIAL = frozenset(("position_bias", "cache", "softcap", "s_aux"))  # what `sdpa` may be asked for besides
_ADDED = ("position_bias", "sinks")  # what `attention` may be, which the operator is not


def require_kv_bits(function: str, bits: int | None) -> None:
    """Raises: ValueError for what no cache can have."""
    if bits is not None and bits not in KV_BITS:
        raise ValueError(f"moe_mps::{function}: kv_bits must be 8 or 16, got {bits!r}")


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of the attention layers that `use_attention` can let run on the operator.

    Those of encoders only where torch's attention lacks what they need, or keeps a mask of their window.
    """
    found = {}
    for name, module in model.named_modules():
        causal = getattr(module, "is_causal", None)
        if not isinstance(causal, bool):
            continue
        if "ALL_ATTENTION_FUNCTIONS" not in getattr(_code(module), "co_names", ()):
            continue
        implementation = _implementation_for(module)
        if implementation == NAME or (implementation is not None and (causal or _has_window(module))):
            found[name] = module
    return found


def _has_window(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "sliding_window", None) is not None


def choose_implementations(layers: Iterable[nn.Module]) -> None:
    """Names the implementations of these layers, before forwards that ask for the name are rewritten."""
    first: dict[int, str] = {}  # {id of a config: what it named before its first layer}
    for module in layers:
        config: Any = module.config
        before, wanted = config._attn_implementation, _implementation_for(module)
        before = first.setdefault(id(config), "eager" if before == NAME else before)
        if wanted != before:
            state_of(module).previous.setdefault(_IMPLEMENTATION, (config, before))
            config._attn_implementation = wanted


def use_attention(layers: Iterable[nn.Module]) -> None:
    """Lets these layers run on the operator; called after their forwards are rewritten."""
    for module in layers:
        if module.config._attn_implementation == "sdpa":  # type: ignore[union-attr]  # a layer's config
            wrap_sdpa()
            state_of(module).is_attention = True
        for prepare in LAYER_HOOKS:
            prepare(module)


def _code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(original_class(module).forward), "__code__", None)


def _implementation_for(module: nn.Module) -> str | None:
    """The implementation that can run a module on the operator; None if its code knows others.

    NAME is for what torch's attention lacks. transformers hands the keys that an indexer has chosen to all
    implementations but its own two, for which a module makes masks of them.
    """
    current = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if current not in ("eager", "sdpa", NAME):
        return None
    asks, keywords = _asks(module)
    if asks and set(asks) == {("eager", "sdpa")} and keywords & _CHOICE:
        return NAME
    if current == "sdpa":
        return current
    capped = getattr(module, "attn_logit_softcapping", None) is not None
    if not asks and any(needs(module) for needs in NEEDS_OUR_KERNEL):
        return NAME
    if not isinstance(getattr(module, "sinks", None), Tensor) and not (capped and "softcap" in keywords):
        return None
    return None if asks else NAME


def _asks(module: nn.Module) -> tuple[list[Any], set[Any]]:
    """Names that a forward compares its implementation's with, and names of arguments that it passes on.

    Its bytecode has both. Where it only gets the implementation, the function of eager attention follows.
    """
    code = _code(module)
    loads = itertools.pairwise(dis.get_instructions(code))
    names = [b for a, b in loads if a.argval == "_attn_implementation" and b.opname != "LOAD_GLOBAL"]
    passed = {name for constant in code.co_consts if isinstance(constant, tuple) for name in constant}
    return [each.argval for each in names], passed


def batch_with_own_code(manager: Any) -> None:
    """Patches the class ContinuousBatchingManager: layers that run NAME run their own code in batches.

    transformers has pages for "eager" and "sdpa" only, and goes back to the implementation that it found.
    """
    switch = manager.switch_to_cb_friendly_attn

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        is_ours = model.config._attn_implementation == NAME
        if is_ours:
            model.set_attn_implementation("eager")
        switch(self, model, *args, **kwargs)
        if is_ours:
            self._original_attn_impl = NAME

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn


@functools.cache
def wrap_sdpa() -> None:
    """Puts our functions around transformers' attention `sdpa` and its mask, once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface, wrapper in ((AttentionInterface, _sdpa), (AttentionMaskInterface, _sdpa_mask)):
        own = interface._global_mapping["sdpa"]
        interface.register("sdpa", functools.wraps(own)(functools.partial(wrapper, own)))


def _sdpa_mask(sdpa_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """Result of transformers' function `sdpa_mask`; on mps a CausalMask in its place.

    On a CPU only where it may not be None as an indexer reads it. A static cache's may not be None either;
    its offset is a tensor, and a step would be compiled anew for each token's mask.
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
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`sdpa`, the function of transformers, or the operator for a layer that `use_attention` was given.

    On a CPU torch's attention is faster than the operator's reference, but knows no sinks.
    """
    options = {"scaling": scaling, "dropout": dropout, **kwargs}
    plain = is_causal is not False and dropout == 0.0
    if not _SPECIAL.isdisjoint(kwargs):
        if kwargs.get("s_aux") is not None:
            return attention(module, query, key, value, attention_mask, **options)
        plain = plain and all(kwargs.get(name) is None for name in _SPECIAL)
    options["is_causal"] = is_causal
    if isinstance(key, Promised) and isinstance(value, Promised):
        if plain:
            call = functools.partial(_sdpa, sdpa, module)
            out = _attend_to_promised(call, query, key, attention_mask, options)
            if out is not None:
                return out, None
        key, value = key.elements(), value.elements()
    plain = plain and getattr(module, STATE, NOTHING).is_attention and query.is_mps
    runs = plain and (
        isinstance(attention_mask, CausalMask)
        or (_is_causal(module) and (_is_few(query.shape[2]) or _beats_sdpa(query, key, value)))
    )
    if runs and takes(query, key, value, attention_mask, None):
        return attend(query, key, value, attention_mask, scaling), None
    return sdpa(module, query, _elements(key), _elements(value), _elements(attention_mask), **options)


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
    softcap: float | None = None,
    indices: Tensor | None = None,
    block_indices: Choice | Tensor | None = None,
    **kwargs: Any,
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
        dropout, kwargs: for the model's own code, which runs where dropout is asked for.
        sliding_window: of the layer; a mask holds it already.
        s_aux: [Hq], the sinks.
        softcap: of the scores.
        indices: [B, T, K], the keys that an indexer has chosen for each token; those that the mask hides, and
            -1, count as none.
        block_indices: the blocks of keys that the module's `indexer` chooses for each token and head of keys:
            a Choice, or [B, Hk, T, K], distinct but for -1, which counts as none. A token sees what the mask
            shows of them.

    Returns: [B, T, Hq, Dv], and the attention's weights or None.

    Raises: RuntimeError where the model's own code is needed and its file has none.
    """
    options = kwargs | {"scaling": scaling, "sliding_window": sliding_window, "s_aux": s_aux}
    options |= {"softcap": softcap, "dropout": dropout}
    sees_all = attention_mask is None and not _is_causal(module)
    window = sliding_window if attention_mask is None and not sees_all else None
    lookahead = _ALL_KEYS if sees_all else 0
    _, before = getattr(module, STATE, NOTHING).previous.get(_IMPLEMENTATION, (None, None))
    has_weights = before != "sdpa"
    plain = dropout == 0.0 and not (has_weights and kwargs.get("output_attentions"))
    plain = plain and all(kwargs.get(name) is None for name in _ADDED)
    if isinstance(block_indices, Choice):
        attention_mask = block_indices.as_mask(attention_mask, key.shape[1], query.shape[2], key.shape[2])
    elif block_indices is not None:
        indexer: Any = module.indexer
        of_keys = key.shape[2], query.dtype, query.device, kwargs["position_ids"]
        attention_mask = indexer.build_block_mask(block_indices, attention_mask, *of_keys)
    elif indices is not None and attention_mask is not None:
        by_operator = plain and takes(query, key, value, None, s_aux)
        attention_mask, indices = _selection(attention_mask, indices, query, by_operator)
    if isinstance(key, Promised) and isinstance(value, Promised):
        given = {"window": window, "sinks": s_aux, "softcap": softcap, "indices": indices}
        call, given["lookahead"] = functools.partial(attention, module), lookahead
        out = _attend_to_promised(call, query, key, attention_mask, options, **given) if plain else None
        if out is not None:
            return out, None
        key, value = key.elements(), value.elements()
    if plain and takes(query, key, value, attention_mask, s_aux):
        order = (window, s_aux, softcap, indices, lookahead)
        return attend(query, key, value, attention_mask, scaling, *order), None
    if attention_mask is None and query.shape[2] > 1 and not sees_all:
        key, value = _seen(query, key, value)
    mask = None if sees_all else _additive(_elements(attention_mask), query, key, window)
    eager = _eager_function(module)
    out, weights = eager(module, query, _elements(key), _elements(value), mask, **options)
    return out, weights if has_weights else None


def _eager_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The model's own attention. Raises: RuntimeError where its file has none."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)  # FSDP2 puts a class on top
    functions = (getattr(file, "eager_attention_forward", None) for file in files)
    eager = next(filter(None, functions), None)
    if eager is None:
        raise RuntimeError(
            f"torch_moe_mps: attention of {type(module).__name__} must be in a file with "
            "eager_attention_forward, which training and dropout need, got none"
        )
    return eager


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of NAME, an additive one; None only where eager's may be, for own code adds columns to it."""
    from transformers.masking_utils import eager_mask

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
    from transformers.masking_utils import causal_mask_function

    plain = options.get("allow_is_causal_skip", True)
    plain = plain or options.get("mask_function") is causal_mask_function
    return CausalMask.of(**{**options, "allow_is_causal_skip": plain})


def _selection(
    mask: Tensor, indices: Tensor, query: Tensor, by_operator: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, indices [B, 1, T, K]) of keys that are chosen and shown, one of them None.

    The operator takes indices of few tokens, which read nothing else, and masks of bits of more.
    """
    keys = mask.shape[3]
    if isinstance(mask, CausalMask):
        if indices.shape[2] >= mask.seen:
            return mask, None
        if by_operator:
            indices = (indices if hasattr(indices, IN_ORDER) else _in_order(indices, mask)).unsqueeze(1)
            return (None, indices) if query.shape[2] <= MOST_OF_LATENTS else (_as_bits(indices, keys), None)
    chosen = torch.where(indices < 0, keys, indices).unsqueeze(1).long()
    shown = torch.zeros((*chosen.shape[:3], keys + 1), dtype=torch.bool, device=mask.device)
    shown = shown.scatter(3, chosen, True)[..., :keys]
    elements: Tensor = _elements(mask)
    if mask.dtype == torch.bool:
        return elements & shown, None
    return elements.masked_fill(~shown, torch.finfo(mask.dtype).min), None


def _in_order(indices: Tensor, mask: CausalMask) -> Tensor:
    """The indices [B, T, K] with -1 in place of keys that the mask hides."""
    tokens = mask.shape[2]
    own = torch.arange(mask.seen - tokens, mask.seen, dtype=torch.int32, device=indices.device)[:, None]
    shown = indices <= own + mask.lookahead
    if mask.window is not None:
        shown = shown & (indices > own - mask.window)
    if mask.key_range is not None:
        first, end = mask.key_range[:, :, None, None].unbind(1)
        shown = shown & (indices >= first) & (indices < end)
    return indices.masked_fill(~shown, -1)


def _as_bits(indices: Tensor, keys: int) -> Tensor:
    """The mask of bits of indices [B, 1, T, K], which are distinct but for -1."""
    bits = indices.new_zeros((*indices.shape[:3], ceil(keys / WORD)))
    for few, some in zip(bits.split(_AT_ONCE, 2), indices.split(_AT_ONCE, 2), strict=True):
        bit = torch.where(some < 0, 0, torch.ones_like(some) << (some & (WORD - 1)))
        few.scatter_add_(3, (some.clamp(min=0) >> WORD.bit_length() - 1).long(), bit)
    return bits


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    indices: Tensor | None = None,
    lookahead: int = 0,
    relative: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    asked: dict[str, Any] = {}
    if type(mask) is ChosenMask:
        indices = mask.read_by_one()
        if indices is None:
            outs = []
            for tokens, seen, bits in mask.slices():
                some = _first(key, seen), _first(value, seen)
                outs.append(attend(query[:, :, tokens], *some, bits, scale, None, sinks, softcap))
            return torch.cat(outs, 1) if len(outs) > 1 else outs[0]
        asked["index_block"], mask = mask.choice.block, None
    key_range = None
    if indices is not None:
        window = None
    elif mask is None:
        if query.shape[2] > 1 and lookahead == 0:
            key, value = _seen(query, key, value)
    elif isinstance(mask, CausalMask):
        key, value = _first(key, mask.seen), _first(value, mask.seen)
        window, key_range, lookahead, mask = mask.window, mask.key_range, mask.lookahead, None
    asked |= {"mask": mask, "window": window, "key_range": key_range, "softcap": softcap, "sinks": sinks}
    asked |= {"indices": indices, "relative": relative, "dtype": dtype, "lookahead": lookahead or None}
    options = {name: given for name, given in asked.items() if given is not None}  # each takes host time
    if isinstance(key, QuantizedStates) and isinstance(value, QuantizedStates):
        options |= {"k_scales": key.scales, "k_biases": key.biases}
        options |= {"v_scales": value.scales, "v_biases": value.biases}
        key, value = key.packed, value.packed
    return torch.ops.moe_mps.attention(query, key, value, scale, **options)


def _attend_to_promised(
    call: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Promised,
    mask: Tensor | None,
    options: dict[str, Any],
    **given: Any,
) -> Tensor | None:
    """Attention to keys and values that are still latents; None where all of them may be expanded.

    The operator, which gets what is `given`, reads the latents. Where it cannot, `call` runs with `options`
    for some heads at a time, which are expanded.
    """
    source, scaling = key.source, options["scaling"]
    brought = source.brought(query)
    if brought is not None:
        keys, values = source.keys_and_values()
        if takes(brought, keys, values, mask, given.get("sinks")):
            scaling = query.shape[3] ** -0.5 if scaling is None else scaling
            given["dtype"] = None if query.dtype == torch.float32 else torch.float32
            return source.taken_back(attend(brought, keys, values, mask, scaling, **given))
    if given.get("indices") is not None or (mask is not None and mask.shape[1] != 1):
        return None
    outs, sinks = [], options.get("s_aux")
    for heads, keys, values in source.some_heads():
        of_heads = options if sinks is None else options | {"s_aux": sinks[heads]}
        outs.append(call(query[:, heads], keys, values, mask, **of_heads)[0])
    return torch.cat(outs, 2) if outs else None


def _is_causal(module: nn.Module) -> bool:
    return getattr(module, "is_causal", True) is not False


def _elements(tensor: Any) -> Any:
    return tensor.elements() if isinstance(tensor, Deferred) else tensor


def _seen(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a static cache that its several first tokens see without a mask."""
    return _first(key, query.shape[2]), _first(value, query.shape[2])


def _first(states: Tensor, tokens: int) -> Tensor:
    return states[:, :, :tokens] if states.shape[2] > tokens else states


def _is_few(tokens: int) -> bool:
    """False for a symbolic number, which torch.export would have to specialise on."""
    return tokens <= MOST_TOKENS if type(tokens) is int else statically_known_true(tokens <= MOST_TOKENS)


def _beats_sdpa(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's attention on MPS would store the scores of a prompt, or keep the display waiting."""
    return query.shape[3] != value.shape[3] or query.shape[3] > SDPA_HEAD or _is_long(query, key)


def _is_long(query: Tensor, key: Tensor) -> bool:
    """Whether torch's one dispatch would take so long that macOS may stop it; the operator's is cut."""
    (batch, heads, tokens, width), keys = query.shape, key.shape[2]
    if torch.compiler.is_compiling() or host_library() is None or not type(tokens) is type(keys) is int:
        return False
    return torch.ops.moe_mps._is_long(2.0 * batch * heads * width * tokens * (keys - tokens / 2))


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> bool:
    """Whether the operator computes what a call asks for."""
    tensors = (query, key, value, mask, sinks)
    return (
        query.dtype == key.dtype == value.dtype in ACTIVATION_DTYPES
        and query.shape[3] <= MAX_HEAD
        and value.shape[3] <= MAX_VALUE_HEAD
        and (mask is None or _is_plain(mask, query, key))
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))
    )


def _is_plain(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask is the same for the heads of a key head and has a column, or a bit, for each key."""
    batches = (query.shape[0],) if isinstance(mask, CausalMask) else (1, query.shape[0])
    columns = ceil(key.shape[2] / WORD) if mask.dtype == torch.int32 else key.shape[2]
    fits = mask.dim() == 4 and mask.shape[0] in batches and mask.shape[1] in (1, key.shape[1])
    return fits and mask.shape[2:] == (query.shape[2], columns)


def _additive(mask: Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """The mask in the form that a model's own code adds to the scores."""
    if mask is None:
        keys = key.shape[2]
        mask = seen_in_order(query.shape[2], keys, keys, window, None, query.device)
    if mask.shape[1] > 1:  # of heads of keys
        mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)
    return additive(mask, query.dtype) if mask.dtype == torch.bool else mask
