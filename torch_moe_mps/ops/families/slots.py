"""Slots of experts that are not all in memory: where the experts of a layer lie, by the layer's pool."""

import atexit
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._extension import host_library
from .._checks import Check
from .._registry import operator
from .._sample import Calls, Changes

RESIDENT = 0  # the pool in which every expert lies in the slot of its own number
LIMIT = 3.5  # seconds that a GPU may wait for an answer: macOS ends one that waits for some 5
MOST_ID = 2**31 - 1


class ForkSafeRLock:
    """A lock that a thread may take again. In a fork it is free: no other thread has come along."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


# Held from a request of slots until what reads them is computed or encoded: the experts of another thread's
# request may take their place.
slots_lock = ForkSafeRLock()


class SlotPool(Protocol):
    """Experts of one layer in memory, by slots."""

    def slots(self, ids: Tensor) -> Tensor:
        """Slots of experts, which lie in them when this returns. The CPU asks it; a GPU asks the host.

        Args:
            ids: [n], int32 on the CPU, as the router chose them; -1 for a negative one.

        Returns: [n], int32 on the CPU; an id that is no expert stays as it is: some mean the identity.
        """
        ...


_pools: dict[int, "weakref.ref[SlotPool]"] = {}
_numbers = itertools.count(RESIDENT + 1)


def new_number() -> int:
    """A number for a pool, by which `_expert_slots` calls it."""
    return next(_numbers)


def register_pool(pool: SlotPool, number: int) -> None:
    """Makes a number that of a pool, which the host has under it, too. It ends with the pool."""
    _pools[number] = weakref.ref(pool)
    if host_library() is not None:
        _close_at_exit()
    weakref.finalize(pool, release_pool, number).atexit = False


@functools.cache
def _close_at_exit() -> None:
    """A process ends, although a disk that a GPU waits for is silent."""
    atexit.register(torch.ops.moe_mps._close_slot_requests)


def with_slots_locked(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks for slots and uses them before another thread asks."""

    def run_locked(*arguments: Any) -> Any:
        with slots_lock:
            return run(*arguments)

    return run_locked


def release_pool(number: int) -> None:
    """Ends the use of a number."""
    if _pools.pop(number, None) is not None and host_library() is not None:
        torch.ops.moe_mps._release_slot_pool(number)


def host_view(tensor: Tensor) -> Tensor:
    """View of a tensor's memory on the CPU; the tensor itself if it lies there.

    Neither side waits for the other: the host may read what the GPU has finished, and write what it does not
    use.
    """
    view: Tensor = tensor if tensor.device.type == "cpu" else torch.ops.moe_mps._host_view(tensor)
    return view


def _slots_of(number: int, ids: Tensor) -> Tensor:
    """Slots of experts [n], int32 on the CPU, by a pool. Raises what the pool raises."""
    if number == RESIDENT:
        return ids
    if (pool := _pools.get(number, lambda: None)()) is None:
        raise RuntimeError("the pool of slots was freed")
    return pool.slots(ids)


def _meta_expert_slots(check: Check, ids: Tensor, pool: int) -> None:
    if pool != RESIDENT and pool not in _pools:
        check.fail("pool", "the number of a pool of slots", pool)


@operator("ids[...]:id -> [...]:int32", _meta_expert_slots)
def _expert_slots(ids: Tensor, pool: int) -> Tensor:
    """Slots of a layer's experts, for operators whose stacks are [slots, ...].

    On Metal the GPU waits for the answer, and the host does not: it goes on encoding. An error of the pool,
    or an answer that is later than its limit, is raised where the host waits for the GPU, as a fault of the
    GPU is; all slots are 0 until then.

    Args:
        ids: experts, int32 or int64.
        pool: its number, as of `new_number`.

    Returns: slots, int32, in the shape of `ids`.

    Raises: ValueError for a dtype or a pool that does not exist; on a CPU what the pool raises.
    """
    flat = ids.reshape(-1).clamp(-1, MOST_ID).int()
    return _slots_of(pool, flat.cpu()).view(ids.shape).to(ids.device)


CALLS: Calls = {"_expert_slots": lambda s: {"ids": s.topk_ids, "pool": RESIDENT}}
CHANGES: Changes = {"_expert_slots": lambda s: [{"ids": s.topk_ids.t()}, {"ids": s.topk_ids.long()}]}
