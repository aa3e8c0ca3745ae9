"""How many kernels a program launches: operators of aten that are no views, and the package's dispatches."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from torch_moe_mps.models.attention.causal_mask import CausalMask
from torch_moe_mps.models.basics.interface import is_experts
from torch_moe_mps.models.caches.deferred_states import deferred
from torch_moe_mps.models.caches.prompt_cache import new_cache, takes_layers
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import CACHE, cache_among, cache_name
from torch_moe_mps.models.upstream.reach import hold_reach
from torch_moe_mps.transformers.deferrable import deferrable_layers

from . import tiny_models

# Operators that launch nothing on MPS: memory without values, and bookkeeping.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts operators of aten by name. Those of this package are counted as dispatches, by the simulator."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(cls, CausalMask) for cls in types):  # which may take what is asked without a launch
            return NotImplemented
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and not function.is_view and name not in FREE and not self.paused:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class AttentionIsOne(TorchFunctionMode):
    """Attention is one operator on MPS; elsewhere aten takes it apart."""

    def __init__(self, launches: Launches):
        super().__init__()
        self.launches = launches

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.launches.counts["scaled_dot_product_attention"] += 1
        self.launches.paused = True
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.launches.paused = False


def launches(simulated, run: Callable[[], object]) -> Counter[str]:
    """Names of operators and kernels -> how often `run` launches them."""
    with torch.no_grad(), simulated.trace() as commands, Launches() as mode, AttentionIsOne(mode):
        run()
    return mode.counts + kernels_of(commands)


@contextmanager
def own_interfaces() -> Iterator[None]:
    """Models get transformers' own attention and masks, whichever accelerated models are alive."""
    _held = hold_reach("transformers")  # its rows are neither put in nor undone meanwhile
    entries = (AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, sdpa_mask)
    with ExitStack() as stack:
        for interface, function in entries:
            stack.enter_context(mock.patch.dict(interface._global_mapping, sdpa=function))
        yield


def kernels_of(commands: object) -> Counter[str]:
    return Counter(line.split()[0] for line in str(commands).splitlines() if " grid " in line)


_WIDTHS = {"q_lora_rank": 32, "kv_lora_rank": 32, "shared_expert_intermediate_size": 64}
# Sizes of single architectures at which all matrices can be quantised: what makes compressed keys, too. Or
# at which the part of a head that turns is whole vectors.
_TURNING_IN_PART = ("laguna", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_WIDER = {"deepseek_v4": {"head_dim": 64}, **{name: {"head_dim": 32} for name in _TURNING_IN_PART}}
_WIDER_OTHERS: dict[str, dict] = {
    "helium": {"head_dim": 16},
    "mamba2": {"head_dim": 32},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 32]},
}


def model_on_mps(architecture: str, dtype: torch.dtype = torch.bfloat16, **overrides: object) -> nn.Module:
    """A tiny model, of sizes at which all its matrices can be quantised."""
    with tiny_models.groups_of_32(), tiny_models.sizes(**_WIDTHS | _WIDER.get(architecture, {})):
        return tiny_models.tiny_model(architecture, dtype, **overrides).to("mps")


def other_on_mps(architecture: str) -> nn.Module:
    """The same of a causal model that `tiny_models.other_causal` names."""
    others = {name: 64 for name, value in tiny_models.SIZES_OF_OTHERS.items() if value in (32, 48)}
    with tiny_models.groups_of_32(), tiny_models.sizes(**_WIDTHS | _WIDER.get(architecture, {})):
        model = tiny_models.other_model(architecture, others, **_WIDER_OTHERS.get(architecture, {}))
    return tiny_models.as_loaded(model, torch.bfloat16).to("mps")


def layers_of(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that has the layers of a model's decoder, and the name of their list.

    Raises: LookupError for none.
    """
    decoder, config = model.get_decoder(), model.config.get_text_config(decoder=True)
    if not isinstance(decoder, PreTrainedModel):  # some call their head so
        decoder = model
    others: set[nn.Module] = set()
    for module in decoder.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is not type(config):
            others.update(module.modules())  # of images, sounds
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and module not in others:
                return module, name
    raise LookupError("it has no list of layers")


def name_of_cache(model: nn.Module) -> str:
    """The argument of a model's forward that is its cache; a name that fits none without one."""
    return cache_name(type(model).forward) or CACHE


def prompted(model: nn.Module, tokens: list[int], rows: int = 1) -> Any:
    """The cache after a prompt, made before it, as generate() does; of equal rows."""
    ids = torch.tensor([tokens] * rows, device="mps")
    with torch.no_grad():
        if model.can_generate() and not takes_layers(model):  # its code takes no other cache
            return cache_among(model(ids, use_cache=True))
        cache = new_cache(model)
        model(ids, **{name_of_cache(model): cache}, use_cache=True)
    if not len(getattr(*layers_of(model))):  # nothing fills it, and calls that find it empty are not captured
        cache.layers += [] if cache.layers else [DynamicLayer()]
        layer = next((layer for layer in cache.layers if "keys" in vars(layer)), None)
        if layer is None:
            cache.layers[0].lazy_initialization(torch.zeros(rows, 1, 4, device="mps"))
        else:
            layer.keys = ids.new_empty(rows, 1, 0, 8)
    return cache


def operators_of_token(model: nn.Module) -> Counter[str]:
    """The operators that a model's last captured token ran, without views and what launches nothing."""
    captures = captures_of(model)
    assert captures is not None and captures.programs, str(captures)
    names = [op.overloadpacket.__name__ for op in captures.programs[0].operators if not op.is_view]
    return Counter(name for name in names if name not in FREE)


def of_aten(model: nn.Module) -> Counter[str]:
    """The operators of aten among them; the simulator counts the dispatches of the package's."""
    ours = set(dir(torch.ops.moe_mps))
    return Counter({name: n for name, n in operators_of_token(model).items() if name not in ours})


class NotCaptured(Exception):
    """No token of a model is captured, and why."""


def captured_call(
    model: nn.Module,
    rows: int = 1,
    length: int = 4,
    tokens: Sequence[int] = (1,),
    lags: bool = False,
    **options: object,
) -> Callable[..., None]:
    """A model's call for tokens of each row, as a program. `accelerate` has seen MOE_MPS_CAPTURE=1.

    It comes behind as many tokens as the one that was captured, for which others may run other operators. It
    takes how many tokens each row has, which are the first of `tokens` without.

    Args:
        length: of the prompt before the first token; the fourth is captured.
        tokens: how many each row has, in turns, in the calls until one is captured.
        lags: states lag where they may.
        options: of the model's forward.

    Raises: NotCaptured, from the call, too.
    """

    def begun() -> Any:
        cache = prompted(model, [*range(1, length + 1)], rows)
        for number, kind in deferrable_layers(model).items() if lags else ():
            if number < len(cache.layers):  # layers may have been left out
                cache.layers[number] = deferred(cache.layers[number], kind)
        return cache

    cache = begun()
    captures, name = captures_of(model), name_of_cache(model)
    if captures is None:
        raise NotCaptured("its forward has no argument for a cache")
    captures.clear()

    def call(count: int = tokens[0]) -> None:
        token = torch.tensor([[5] * count] * rows, device="mps")
        with torch.no_grad():
            model(token, **{name: cache}, use_cache=True, **options)

    def captured(count: int = tokens[0]) -> None:
        captures.reason = "the program does not fit the next token"
        call(count)
        if captures.reason is not None:
            raise NotCaptured(captures.reason)

    counts = [tokens[number % len(tokens)] for number in range(8)]  # after a fault, the eighth is captured
    for number, count in enumerate(counts):
        call(count)
        if captures.programs:
            cache = begun()
            for before in counts[:number]:
                call(before)
            return captured
    raise NotCaptured(captures.reason)


def captured_token(simulated, model: nn.Module, *given: Any, **options: object) -> Counter[str]:
    """What captured tokens launch: operators of aten that are no views, and the package's dispatches.

    Args:
        given, options: of `captured_call`.
    """
    with simulated.dropped():
        call = captured_call(model, *given, **options)
        with simulated.trace() as commands:
            call()
    return of_aten(model) + kernels_of(commands)


PROMPT, TOKENS = 29, 16  # lengths at which `reason_against_capture` looks


def reason_against_capture(model: nn.Module) -> str | None:
    """Why a token in the second half of TOKENS behind a prompt of an accelerated model is not captured.

    Those in the first half may be of several kinds, each of which is captured at its third call. None if all
    are. A program that holds for one length of the context does not count.
    """
    captures = captures_of(model)
    if captures is None:
        return "its forward has no argument for a cache"
    captures.clear()
    cache, token = prompted(model, [*range(1, PROMPT + 1)]), torch.tensor([[5]], device=model.device)
    reasons = []
    for _ in range(TOKENS):
        with torch.no_grad():
            model(token, **{name_of_cache(model): cache}, use_cache=True)
        reasons.append(captures.reason)
    return next(filter(None, reasons[TOKENS // 2 :]), None)


# What the configs of models say of each layer.
_KINDS = ("layer_types", "layers_block_type", "indexer_types", "mlp_layer_types")


def types_of_layers(model: nn.Module) -> list[str]:
    """What tells the layers of a model apart, in the words of its config; "" where all are alike."""
    layers, config = getattr(*layers_of(model)), model.config.get_text_config()
    count = len(layers)
    given = [getattr(config, name, None) for name in _KINDS]
    lists = [kinds[:count] for kinds in given if isinstance(kinds, list) and len({*kinds[:count]}) > 1]
    if not lists:
        sparse = [any(map(is_experts, layer.modules())) for layer in layers]
        lists = [["sparse" if each else "dense" for each in sparse]] if len({*sparse}) > 1 else []
    words = [[kind.removesuffix("_attention").replace("_", " ") for kind in kinds] for kinds in lists]
    return [", ".join(dict.fromkeys(of_layer)) for of_layer in zip(*words, strict=True)] or [""] * count


def launches_by_type(
    simulated, model: nn.Module, prompt: int = 0, computes: bool = False
) -> dict[str, Counter[str]]:
    """{type of layer: what the last layer of this type launches for one token, or a prompt of so many}.

    Without `computes` nothing is computed, which some models' own code does not survive.
    """
    ids = torch.arange(1, max(prompt, 1) + 1, device="mps")[None] % 50
    device = nullcontext if computes else simulated.dropped
    with device():
        cache = DynamicCache(config=model.config) if prompt else prompted(model, [1, 2, 3, 4])
    found: dict[str, Counter[str]] = {}
    of_layer: dict[nn.Module, Counter[str]] = defaultdict(Counter)  # which may run several times
    inside: list[tuple[ExitStack, Any, Launches]] = []

    def begin(*_: object) -> None:
        stack = ExitStack()
        commands, mode = stack.enter_context(simulated.trace()), stack.enter_context(Launches())
        stack.enter_context(AttentionIsOne(mode))
        inside.append((stack, commands, mode))

    def end(kind: str, layer: nn.Module, *_: object) -> None:
        stack, commands, mode = inside.pop()
        stack.close()
        of_layer[layer] += mode.counts + kernels_of(commands)
        found[kind] = of_layer[layer]

    hooks = []
    for kind, layer in zip(types_of_layers(model), getattr(*layers_of(model)), strict=True):
        hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(partial(end, kind))]
    try:
        with torch.no_grad(), device():
            model(ids, **{name_of_cache(model): cache}, use_cache=True)
    finally:
        for stack, *_ in inside:  # of a layer that raises
            stack.close()
        for hook in hooks:
            hook.remove()
    return found


def captured_by_type(
    simulated,
    model: nn.Module,
    rows: int = 1,
    length: int = 4,
    tokens: Sequence[int] = (1,),
    lags: bool = False,
) -> dict[str, Counter[str]]:
    """{type of layer: what captured tokens launch more with the last layer of this type than without}.

    "outside" is what it launches without layers; the first layer has what all share. Raises: NotCaptured.
    """
    owner, name = layers_of(model)
    layers, kinds = getattr(owner, name), [*types_of_layers(model), "outside"]
    found: dict[str, Counter[str]] = {}
    above: Counter[str] = Counter()
    try:
        for count in range(len(layers), -1, -1):
            setattr(owner, name, layers[:count])
            counts = captured_token(simulated, model, rows, length, tokens, lags)
            if count < len(layers):
                found.setdefault(kinds[count], above - counts)
            above = counts
    finally:
        setattr(owner, name, layers)
    return {**dict(reversed(found.items())), "outside": above}


def token_by_type(simulated, model: nn.Module) -> dict[str, Counter[str]]:
    """`captured_by_type`, or `launches_by_type` of a model without captured tokens."""
    try:
        return captured_by_type(simulated, model)
    except NotCaptured as reason:
        print(f"{type(model).__name__} runs module by module: {reason}")  # shown where a row has changed
        return launches_by_type(simulated, model)
