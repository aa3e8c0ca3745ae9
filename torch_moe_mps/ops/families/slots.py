"""Slots of experts that are not all in memory: where the experts of a layer lie, by the layer's pool."""

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._extension import host_library
from ..._text import first_line
from .._checks import Check
from .._registry import operator
from .._sample import Calls, Changes

RESIDENT = 0  # the pool in which every expert lies in the slot of its own number
LIMIT = 3.5  # seconds that a GPU may wait for an answer: macOS ends one that waits for some 5
MOST_ID = 2**31 - 1


class Alone:
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
using_slots = Alone()


class SlotPool(Protocol):
    """Experts of one layer in memory, by slots."""

    def slots(self, ids: Tensor) -> Tensor:
        """Slots of experts, which lie in them when this returns.

        Args:
            ids: [n], int32 on the CPU, as the router chose them; -1 for a negative one.

        Returns: [n], int32 on the CPU; -1 for an id that is no expert.
        """
        ...


_pools: dict[int, "weakref.ref[SlotPool]"] = {}
_numbers = itertools.count(RESIDENT + 1)
_starting = threading.Lock()
_thread: threading.Thread | None = None


def register_pool(pool: SlotPool, name: str, limit: float = LIMIT, file: str = "") -> int:
    """Number of a pool for `_expert_slots`. The pool is not kept: its number ends with it.

    For a GPU one thread calls all pools, in the order of the GPU's requests. When it calls `slots`, the GPU
    has finished all that was encoded before the request, and waits for the answer. `slots` must not call
    operators on mps, and should release Python's lock while it reads.

    Args:
        name: of the layer, for errors.
        limit: seconds that an answer to a GPU may take from when the ids are there.
        file: that the pool reads, for errors.
    """
    number = next(_numbers)
    _pools[number] = weakref.ref(pool)
    if host_library() is not None:
        torch.ops.moe_mps._add_slot_pool(number, name, limit, file)
    weakref.finalize(pool, release_pool, number).atexit = False
    return number


def using(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks for slots and uses them before another thread asks."""

    def run_alone(*arguments: Any) -> Any:
        with using_slots:
            return run(*arguments)

    return run_alone


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


def _check_pool(check: Check, number: int) -> None:
    if number != RESIDENT and number not in _pools:
        check.fail("pool", "the number of a pool of slots", number)


def _start() -> None:
    """Starts the thread that answers the GPU, if there is none."""
    global _thread
    with _starting:
        if _thread is None and host_library() is not None:
            _thread = threading.Thread(target=_answer, name="slots of experts", daemon=True)
            _thread.start()
            atexit.register(_close, _thread)


def _answer() -> None:
    operators = torch.ops.moe_mps
    while True:
        request, number, ids = operators._next_slot_request()
        if request == 0:
            return
        try:
            operators._answer_slot_request(request, _slots_of(number, ids))
        except BaseException as error:  # it ends the step that asked
            operators._fail_slot_request(request, first_line(error) or type(error).__name__)


def _close(thread: threading.Thread) -> None:
    torch.ops.moe_mps._close_slot_requests()
    thread.join(timeout=1.0)  # a disk may never answer


def _meta_expert_slots(check: Check, ids: Tensor, pool: int) -> None:
    _check_pool(check, pool)
    if ids.device.type == "mps":
        _start()


@operator("ids[...]:id -> [...]:int32", _meta_expert_slots)
def _expert_slots(ids: Tensor, pool: int) -> Tensor:
    """Slots of a layer's experts, for operators whose stacks are [slots, ...].

    On Metal the GPU waits for the answer, and the host does not: it goes on encoding. An error of the pool,
    or an answer that is later than its limit, is raised where the host waits for the GPU, as a fault of the
    GPU is; all slots are 0 until then.

    Args:
        ids: experts, int32 or int64.
        pool: its number, by `register_pool`.

    Returns: slots, int32, in the shape of `ids`.

    Raises: ValueError for a dtype or a pool that does not exist; on a CPU what the pool raises.
    """
    flat = ids.reshape(-1).clamp(-1, MOST_ID).int()
    return _slots_of(pool, flat.cpu()).view(ids.shape).to(ids.device)


CALLS: Calls = {"_expert_slots": lambda s: {"ids": s.topk_ids, "pool": RESIDENT}}
CHANGES: Changes = {"_expert_slots": lambda s: [{"ids": s.topk_ids.t()}, {"ids": s.topk_ids.long()}]}
