"""How many kernels a program launches: operators of aten that are no views, and the package's dispatches."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from torch_moe_mps.transformers.attention.causal_mask import CausalMask
from torch_moe_mps.transformers.basics.interface import is_experts
from torch_moe_mps.transformers.capture.calls import captures_of

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


def kernels_of(commands: object) -> Counter[str]:
    return Counter(line.split()[0] for line in str(commands).splitlines() if " grid " in line)


# Sizes of single architectures at which all matrices can be quantised: what makes compressed keys, too. Or
# at which the part of a head that turns is whole vectors.
_WIDER = {"deepseek_v4": {"head_dim": 64}, "qwen3_next": {"head_dim": 32}}


def model_on_mps(architecture: str) -> nn.Module:
    """A tiny model in bfloat16, of sizes at which all its matrices can be quantised."""
    widths = {"q_lora_rank": 32, "kv_lora_rank": 32, "shared_expert_intermediate_size": 64}
    widths |= _WIDER.get(architecture, {})
    with tiny_models.groups_of_32(), tiny_models.sizes(**widths):
        return tiny_models.tiny_model(architecture, torch.bfloat16).to("mps")


def prompted(model: nn.Module, tokens: list[int], rows: int = 1) -> DynamicCache:
    """The cache after a prompt, made before it, as generate() does; of equal rows."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([tokens] * rows, device="mps")
    with torch.no_grad():
        try:
            model(ids, past_key_values=cache, use_cache=True)
        except ValueError:  # MiniMax takes only a cache of its own class
            cache = model(ids, use_cache=True).past_key_values
    if not model.get_decoder().layers:  # nothing fills it, and calls that find it empty are not captured
        layer = next(layer for layer in cache.layers if "keys" in vars(layer))
        layer.keys = ids.new_empty(rows, 1, 0, 8)
    return cache


def operators_of_token(model: nn.Module) -> Counter[str]:
    """The operators that a model's last captured token ran, without views and what launches nothing."""
    captures = captures_of(model)
    assert captures is not None and captures.programs, str(captures)
    names = [op.overloadpacket.__name__ for op in captures.programs[0].operators if not op.is_view]
    return Counter(name for name in names if name not in FREE)


class NotCaptured(Exception):
    """No token of a model is captured, and why."""


def captured_call(model: nn.Module, rows: int = 1, length: int = 4) -> Callable[[], None]:
    """A model's call for a token of each row, as a program. `accelerate` has seen MOE_MPS_CAPTURE=1.

    It comes behind as many tokens as the one that was captured, for which others may run other operators.

    Args:
        length: of the prompt before the first token; the fourth is captured.

    Raises: NotCaptured, from the call, too.
    """
    cache = prompted(model, [*range(1, length + 1)], rows)
    token = torch.tensor([[5]] * rows, device="mps")
    captures = captures_of(model)
    assert captures is not None
    captures.clear()

    def call() -> None:
        with torch.no_grad():
            model(token, past_key_values=cache, use_cache=True)

    def captured() -> None:
        captures.reason = "the program does not fit the next token"
        call()
        if captures.reason is not None:
            raise NotCaptured(captures.reason)

    for before in range(length, length + 8):  # after a fault, the eighth is captured
        call()
        if captures.programs:
            cache = prompted(model, [*range(1, before)], rows)
            call()  # makes room in the cache
            return captured
    raise NotCaptured(captures.reason)


def captured_token(simulated, model: nn.Module, rows: int = 1, length: int = 4) -> Counter[str]:
    """What captured tokens launch: operators of aten that are no views, and the package's dispatches."""
    with simulated.dropped():
        call = captured_call(model, rows, length)
        with simulated.trace() as commands:
            call()
    ours = set(dir(torch.ops.moe_mps))
    others = {name: n for name, n in operators_of_token(model).items() if name not in ours}
    return Counter(others) + kernels_of(commands)


def reason_against_capture(model: nn.Module) -> str | None:
    """Why no token of an accelerated model is captured; None if one is."""
    try:
        captured_call(model)()
    except NotCaptured as reason:
        return str(reason)
    return None


# What the configs of models say of each layer.
_KINDS = ("layer_types", "layers_block_type", "indexer_types", "mlp_layer_types")


def types_of_layers(model: nn.Module) -> list[str]:
    """What tells the layers of a model apart, in the words of its config; "" where all are alike."""
    decoder, config = model.get_decoder(), model.config.get_text_config()
    count = len(decoder.layers)
    given = [getattr(config, name, None) for name in _KINDS]
    lists = [kinds[:count] for kinds in given if isinstance(kinds, list) and len({*kinds[:count]}) > 1]
    if not lists:
        sparse = [any(map(is_experts, layer.modules())) for layer in decoder.layers]
        lists = [["sparse" if each else "dense" for each in sparse]] if len({*sparse}) > 1 else []
    words = [[kind.removesuffix("_attention").replace("_", " ") for kind in kinds] for kinds in lists]
    return [", ".join(dict.fromkeys(of_layer)) for of_layer in zip(*words, strict=True)] or [""] * count


def launches_by_type(simulated, model: nn.Module, prompt: int = 0) -> dict[str, Counter[str]]:
    """{type of layer: what the last layer of this type launches for one token, or a prompt of so many}."""
    ids = torch.arange(1, max(prompt, 1) + 1, device="mps")[None] % 50
    with simulated.dropped():
        cache = DynamicCache(config=model.config) if prompt else prompted(model, [1, 2, 3, 4])
    found: dict[str, Counter[str]] = {}
    inside: list[tuple[ExitStack, Any, Launches]] = []

    def begin(*_: object) -> None:
        stack = ExitStack()
        commands, mode = stack.enter_context(simulated.trace()), stack.enter_context(Launches())
        stack.enter_context(AttentionIsOne(mode))
        inside.append((stack, commands, mode))

    def end(kind: str, *_: object) -> None:
        stack, commands, mode = inside.pop()
        stack.close()
        found[kind] = mode.counts + kernels_of(commands)

    hooks = []
    for kind, layer in zip(types_of_layers(model), model.get_decoder().layers, strict=True):
        hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(partial(end, kind))]
    with torch.no_grad(), simulated.dropped():
        model(ids, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return found


def captured_by_type(simulated, model: nn.Module, rows: int = 1, length: int = 4) -> dict[str, Counter[str]]:
    """{type of layer: what captured tokens launch more with the last layer of this type than without}.

    "outside" is what it launches without layers; the first layer has what all share. Raises: NotCaptured.
    """
    decoder = model.get_decoder()
    layers, kinds = decoder.layers, [*types_of_layers(model), "outside"]
    found: dict[str, Counter[str]] = {}
    above: Counter[str] = Counter()
    try:
        for count in range(len(layers), -1, -1):
            decoder.layers = layers[:count]
            counts = captured_token(simulated, model, rows, length)
            if count < len(layers):
                found.setdefault(kinds[count], above - counts)
            above = counts
    finally:
        decoder.layers = layers
    return {**dict(reversed(found.items())), "outside": above}


def token_by_type(simulated, model: nn.Module) -> dict[str, Counter[str]]:
    """`captured_by_type`, or `launches_by_type` of a model without captured tokens."""
    try:
        return captured_by_type(simulated, model)
    except NotCaptured:
        return launches_by_type(simulated, model)
