"""Values of context variables inside of a block, random numbers, and caches of a bounded size."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


@contextlib.contextmanager
def having(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Inside the block, the variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


class Seeded:
    """Block with seeded random numbers, of torch on the CPU and of a device.

    Behind it they go on as if it had not been.

    Args:
        seed: None does not seed.
    """

    def __init__(self, device: torch.device, seed: int | None):
        self._seed, self._devices = seed, list[Any]()
        if device.type != "cpu":
            self._devices.append(torch.get_device_module(device))
        self._others = list[Tensor]()

    def __enter__(self) -> "Seeded":
        if self._seed is not None:
            self._others = self._states()
            torch.default_generator.manual_seed(self._seed)
            for device in self._devices:
                device.manual_seed(self._seed)
        return self

    def __exit__(self, *error: object) -> None:
        self._swap()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Restores the caller's RNG inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        if self._seed is not None:
            others, self._others = self._others, self._states()
            torch.set_rng_state(others[0])
            for device, state in zip(self._devices, others[1:], strict=True):
                device.set_rng_state(state)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(device.get_rng_state() for device in self._devices)]


class Bounded(dict[Any, Any]):
    """A dictionary that forgets all it has before it has more than `max_entries`."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.max_entries and key not in self:
            self.clear()
        super().__setitem__(key, value)
