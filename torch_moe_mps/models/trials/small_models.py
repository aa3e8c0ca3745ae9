"""Small models of the class of a large one, with layers of each of its kinds."""

import copy
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..._extension import PACKAGE
from ..._text import first_line
from ..basics.state import class_before
from .memory import note_error

WIDEST = 128  # hidden sizes from there on are divided, and down to the next one where that does not fit
_LARGEST = 1024
VOCABULARY = 128
WINDOW = 8  # keys of layers with a window, so that a few tokens fill it
_MOST_LAYERS = 12
_LEAST_EXPERTS = 4
_SIZES_TRIED = 4
_ALIKE = 6  # failures, after which no more sizes are tried
_WIDTHS = re.compile(
    r"(hidden_size|intermediate_size|hidden_dim|ffn_dim|embed_dim|emb_dim|embedding_size|proj_dim|d_model|"
    r"n_embd|n_inner|inner_dim|d_ff|dff|d_ssm|d_inner|lru_width|_width|^dim)$|ffn_hidden_size"
)
_HEADS = re.compile(r"heads$|n_head$|n_head_kv$|head_count|n_groups$|o_groups$")
_HIDDEN = re.compile(r"^(hidden_size|d_model|n_embd|dim|emb_dim)$")
_MAIN_HEADS = re.compile(r"num_attention_heads$|^n_heads?$|^num_heads$|decoder_attention_heads$")
_KEY_HEADS = re.compile(r"num_key_value_heads$|num_kv_heads$|n_head_kv$")
_INNER = re.compile(r"intermediate|ffn|inner|d_ff|dff")
_OF_TEXT = re.compile(r"out_hidden_size|output_dim|projection_dim|text_")  # in parts that are not the text's
_EXPERTS = re.compile(r"(^|_)experts$|num_experts$|local_experts$")
_OTHER_EXPERTS = re.compile(r"shared|per_tok|top|zero|dense")
_LAYERS = re.compile(
    r"num_(hidden_|encoder_|decoder_)?layers$|num_blocks$|n_layers?$|depth$|(encoder|decoder)_layers$"
)
_LISTS_OF_LAYERS = re.compile(r"layers|indices|indexes")
_VOCABULARIES = re.compile(r"vocab_size")
_IDS = re.compile(r"(token_id|token_ids|token_index|_id)$")
_WINDOWS = re.compile(r"(sliding_window|window_size|sliding_window_size|attention_chunk_size)$")
_LEFT_OUT = ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype")


class CannotBeShrunk(Exception):
    """Says why a model has no small one."""


def small_model(model: PreTrainedModel, run: Callable[[PreTrainedModel], object]) -> PreTrainedModel:
    """A model of the same class with smaller sizes that `run` takes, in float32 on the CPU.

    It has layers of all kinds that the model has, and random weights: caches, masks, routers and norms have
    something to be wrong about.

    Raises: CannotBeShrunk where there is none, with the last reason.
    """
    failures: list[str] = []
    text = model.config.get_text_config(decoder=True)
    layers = _layers(model, text)
    kinds = [_kind(layer) for layer in layers]
    cls: Any = class_before(model)
    wanted = {kind for kind in kinds if kind}  # but for what stands where another process has layers
    for narrow, divisor, kept in itertools.product((True, False), divisors(text), [*selections(kinds)]):
        try:
            config = _Shrink(text, divisor, len(kinds), kept, narrow)(model.config)
            with torch.device("meta"):  # first without weights, which take time
                bare = cls(config)
            if {_kind(layer) for layer in _layers(bare, bare.config.get_text_config(decoder=True))} >= wanted:
                small = _built(cls, config)
                run(small)
                return small
            failures.append("its small models lack a kind of its layers")
        except Exception as error:  # the config or the model raises it, for sizes that do not fit
            note_error(error)
            failures.append(f"{type(error).__name__}: {first_line(error)}")
        if failures.count(failures[-1]) == _ALIKE:
            break
    raise CannotBeShrunk(failures[-1] if failures else "its config has no sizes that are known")


def _built(cls: Any, config: PreTrainedConfig) -> PreTrainedModel:
    small: PreTrainedModel = cls(config).float().eval()
    fill(small)
    return small


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights that keep activations alive and routers decided: norms near 1, biases small."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.1, 0.1))
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.uniform_(-0.2, 0.2)


# --- layers


def _layers(model: nn.Module, text: PreTrainedConfig) -> nn.ModuleList:
    """The list of layers of a model's decoder: its length is in the config.

    Raises: CannotBeShrunk for none.
    """
    of_words = [value for value in text.to_dict().values() if isinstance(value, list)]
    counts = {*_of(text, _LAYERS), *(len(one) for one in of_words if all(isinstance(x, str) for x in one))}
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    found = [(name, module) for name, module in named if len(module) in counts]
    if found:  # an encoder's only where no other is: some decoders are called so
        return min(found, key=lambda each: "encoder" in each[0].split("."))[1]
    raise CannotBeShrunk("it has no list of layers whose length is in its config")


def _kind(layer: nn.Module) -> Hashable:
    """Key of a layer: the classes of its modules, and their bool and str attributes.

    Modules of torch, PEFT and this package, which may stand for each other, do not count.
    """
    named = ((name, class_before(module), module) for name, module in layer.named_modules())
    return frozenset(
        (re.sub(r"\d+", "*", name.replace(".base_layer", "")), cls, *_switches(module))
        for name, cls, module in named
        if cls.__module__.partition(".")[0] not in ("torch", "peft", PACKAGE.name)
    )


def _switches(module: nn.Module) -> list[tuple[str, Any]]:
    attributes = (
        (name, value) for name, value in vars(module).items() if name[0] != "_" and name != "training"
    )
    return sorted((name, str(value)) for name, value in attributes if isinstance(value, bool | str))


def selections(kinds: Sequence[Hashable]) -> Iterator[list[int]]:
    """Layers that a small model may have: one of each kind, all up to the last new kind, two of each kind.

    Where a number in the config says which layers are of a kind, the first do not fit.
    """
    places: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    firsts = [found[0] for found in places.values()]
    last = len(kinds) - 1
    tried = [
        firsts if len(firsts) > 1 else [*range(len(kinds))][:2],
        [*range(max(firsts) + 1)],
        [*range(max((first for first in firsts if first < last), default=0) + 1), last],
        sorted(index for found in places.values() for index in found[:2]),
    ]
    for number, kept in enumerate(tried):
        if len(kept) <= _MOST_LAYERS and kept not in tried[:number]:
            yield kept


# --- sizes


def divisors(text: PreTrainedConfig) -> list[int]:
    """Divisors of the hidden size and of the heads that are tried, the likeliest first."""
    hidden, heads, fewer = _of(text, _HIDDEN), _of(text, _MAIN_HEADS), _of(text, _KEY_HEADS)
    if not hidden:
        return []

    def fits(n: int) -> bool:
        rest = [h // n for h in heads if h % n == 0]
        groups = [k // n if k % n == 0 else k for k in fewer]
        return (
            hidden[0] % n == 0 and len(rest) == len(heads) and all(h % k == 0 for h in rest for k in groups)
        )

    every = [n for n in range(1, hidden[0] + 1) if fits(n)]
    small = [n for n in every if hidden[0] // n <= WIDEST]
    large = [n for n in reversed(every) if WIDEST < hidden[0] // n <= _LARGEST]
    return (small + large)[:_SIZES_TRIED]


def _of(config: PreTrainedConfig, names: re.Pattern) -> list[int]:
    values = config.to_dict().items()
    return [value for name, value in values if names.search(name) and type(value) is int and value > 0]


class _Shrink(NamedTuple):
    """Makes smaller configs.

    Attributes:
        text: the part of the config that is the decoder's.
        divisor: of its widths and heads.
        layers: how many it has.
        kept: the ones that a small model has.
        narrow: True if other parts get smaller widths, too.
    """

    text: PreTrainedConfig
    divisor: int
    layers: int
    kept: list[int]
    narrow: bool

    def __call__(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """A config with its parts."""
        values = {k: v for k, v in copy.deepcopy(config.to_dict()).items() if k not in _LEFT_OUT}
        factors = divisors(config) if self.narrow and config is not self.text else []
        for name, value in values.items():
            part = vars(config).get(name)
            if isinstance(part, PreTrainedConfig):
                values[name] = self(part).to_dict()
            elif config is self.text:
                values[name] = self._of_text(name, value)
            else:
                values[name] = self._of_another(name, value, factors[0] if factors else 1)
        result = type(config).from_dict(values)
        if config._attn_implementation in ("eager", "sdpa"):
            result._attn_implementation = config._attn_implementation
        return result

    def _of_text(self, name: str, value: Any) -> Any:
        """The value of a field of a text config in the small model."""
        if isinstance(value, list | tuple):
            return self._list_of_text(name, value)
        if isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()):
            return self._of_each_layer(value)
        if type(value) is not int or value < 1:
            return value
        if value == self.layers and _LAYERS.search(name):
            return len(self.kept)
        if name == "num_kv_shared_layers":
            return sum(layer >= self.layers - value for layer in self.kept)
        if _EXPERTS.search(name) and not _OTHER_EXPERTS.search(name):
            return _experts(value, self.text)
        if _WINDOWS.search(name):
            return min(value, WINDOW)
        return _size(name, value, self.divisor)

    def _list_of_text(self, name: str, values: Any) -> Any:
        """A list of a value for each layer, of numbers of layers, or of something else."""
        if len(values) == self.layers:
            values = [values[layer] for layer in self.kept]
        elif _LISTS_OF_LAYERS.search(name) and all(type(value) is int for value in values):
            return [value for value in values if value in self.kept]
        return [_size(name, value, self.divisor) for value in values]

    def _of_each_layer(self, values: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """Values of single layers, by their numbers."""
        by_number = {int(number): found for number, found in values.items() if str(number).isdecimal()}
        if len(by_number) < len(values):  # it counts something else
            return values
        return {
            index: {name: self._of_text(name, value) for name, value in found.items()}
            for index, layer in enumerate(self.kept)
            if (found := by_number.get(layer))
        }

    def _of_another(self, name: str, value: Any, divisor: int) -> Any:
        """A value of a part that is not the text's, which has a layer or two."""
        if type(value) is int and _LAYERS.search(name):
            return min(value, 2)
        if isinstance(value, list) and _LISTS_OF_LAYERS.search(name) and all(type(i) is int for i in value):
            return [item for item in value if item < 2]
        if value == self.text.hidden_size and _OF_TEXT.search(name):
            return value // self.divisor
        return _size(name, value, divisor)


def _size(name: str, value: Any, divisor: int) -> Any:
    """A width or a number of heads, divided; a size of a vocabulary or an id in it."""
    if type(value) is not int or value < 1:
        return _vocabulary(name, value)
    if _WIDTHS.search(name) and "head" not in name:
        exact = value // divisor if value % divisor == 0 else 0
        aligned = 8 * ceil(value / divisor / 8)  # some kernels ask for eights
        return aligned if not exact or (_INNER.search(name) and value % 8 == 0) else exact
    if _HEADS.search(name):
        return value // divisor if value % divisor == 0 else value
    return _vocabulary(name, value)


def _experts(count: int, config: PreTrainedConfig) -> int:
    """The fewest that a divisor leaves, of which a token chooses no more than half, in groups as before."""
    names = re.compile(r"per_tok|top_?k|moe_k|n_group$|topk_group")
    least = max([_LEAST_EXPERTS, *(2 * n for n in _of(config, names) if n <= count // 2)])
    return next(n for n in range(min(least, count), count + 1) if count % n == 0)


def _vocabulary(name: str, value: Any) -> Any:
    """Ids of single tokens go to the end of the small vocabulary, where no prompt has them."""
    if type(value) is int and _VOCABULARIES.search(name):
        return min(value, VOCABULARY)
    if _IDS.search(name):
        if isinstance(value, list):
            return [_vocabulary(name, item) for item in value]
        if type(value) is int and value >= VOCABULARY // 2:
            return VOCABULARY - 1 - value % (VOCABULARY // 4)
    return value
