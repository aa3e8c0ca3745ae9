"""Helpers to recognise functions and modules by running them on random numbers."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...basics.bounded import Bounded
from ...basics.held import HeldPools
from ...basics.state import STATE, original_class


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Tensors made without a device are on the CPU, where the generators of random ones are."""
    with torch.device("cpu"):
        yield


def tried(function: Callable, *arguments: Any, **options: Any) -> Any:
    """The result of a function of the model; None if it raises, as for arguments that it does not know."""
    try:
        with torch.no_grad():
            return function(*arguments, **options)
    except Exception:  # it is not ours: any error may come of it
        return None


_verdicts = Bounded(256)  # {key: what a trial gave, in a tuple}


def verdict(key: Any, function: Callable, *arguments: Any) -> Any:
    """What `tried` gives, once for all modules with this key: those of a model are alike."""
    found = _verdicts.get(key)
    if found is None:
        found = _verdicts[key] = (tried(function, *arguments),)
    return found[0]


def bare_twin(module: nn.Module) -> Any:
    """A module of the same class with the same attributes, without parameters, buffers and children.

    `copy.copy` would rewrite the copy of a rewritten module, and both would share one state.
    """
    cls: Any = original_class(module)
    twin = cls.__new__(cls)
    nn.Module.__init__(twin)
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and name != STATE}
    vars(twin).update(own)
    return twin.eval()


def agrees(a: object, b: object, rtol: float = 1e-5) -> bool:
    """Whether two results are tensors that are equal up to rounding, or as many of them; None is in both."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(
            x is y is None or agrees(x, y, rtol) for x, y in zip(a, b, strict=True)
        )
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and torch.allclose(a, b, rtol, 1e-5)


def has_parts(module: nn.Module, layers: Iterable[str], numbers: Iterable[str]) -> bool:
    """Whether a module has layers and numbers of these names."""
    own = all(isinstance(module._modules.get(name), nn.Module) for name in layers)
    return own and all(isinstance(getattr(module, name, None), int | float) for name in numbers)


def numbers(*shape: int) -> Tensor:
    """Random ones about 0, the same for each shape."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


class FewInputs(nn.Module):
    """A linear layer of the first four inputs, which gives few numbers their weight."""

    def __init__(self, rows: int):
        super().__init__()
        generator = torch.Generator().manual_seed(rows)
        self.weight = nn.Parameter(torch.randn(rows, 4, generator=generator), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :4] @ self.weight.T


class Normed(nn.Module):
    """A norm of rows of any width."""

    weight = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:])


class HeldKeys(HeldPools):
    """A cache of one layer, which it is itself, that holds an indexer's keys and has no room for more."""

    def __init__(self, keys: Tensor, layer_idx: int = 0):
        self.keys, self.layers = keys, {layer_idx: self}

    @property
    def indexer_keys(self) -> Tensor:
        return self.keys

    def get_seq_length(self) -> int:
        return self.keys.shape[-2]

    def update_indexer(self, keys: Tensor, layer_idx: int = 0) -> Tensor:
        self.keys = torch.cat((self.keys, keys), -2)
        return self.keys

    def index_slots(self, new: Tensor) -> None:
        return None

    def index_slots_of(self, columns: Sequence[Tensor]) -> None:
        return None

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        return pool(0, count)

    indexed, update_index = get_seq_length, update_indexer  # that is MiniMax M3's name
