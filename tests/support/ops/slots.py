"""Operators of the family slots: valid arguments, results, and invalid arguments."""

import functools

import numpy as np
import torch

from support.experts_on_disk import NumberedPool
from support.ops import wrong
from support.oracles_operators import Expected
from torch_moe_mps.ops.families.slots import RESIDENT


@functools.cache
def turned() -> NumberedPool:
    """A pool in whose slots the experts lie in reverse order."""
    pool = NumberedPool("turned", slots=8, experts=8, device="cpu")
    for expert in reversed(range(8)):
        pool.slots(torch.tensor([expert]))
    return pool


def draw__expert_slots(d):
    return {"ids": d.ids(*d.leading(), experts=8), "pool": d.one(RESIDENT, turned().number)}


def expected__expert_slots(a):
    ids = a.ids.long().clamp(-1, 2**31 - 1).int().numpy()
    lies = (ids >= 0) & (ids < 8)
    return [Expected(ids if a.pool == RESIDENT else np.where(lies, 7 - ids, ids).astype(ids.dtype))]


def invalid__expert_slots(zeros):
    return [wrong("the number of a pool of slots, got -3", pool=-3)]
