"""Operators of the family slots: valid arguments, results, and invalid arguments."""

from support.ops import wrong
from support.oracles_operators import Expected
from torch_moe_mps.ops.families.slots import RESIDENT, register_pool


class Turned:
    """A pool in which the experts lie in reverse order."""

    def slots(self, ids):
        return 7 - ids


TURNED = Turned()
NUMBER = register_pool(TURNED, "turned")


def draw__expert_slots(d):
    return {"ids": d.ids(*d.leading(), experts=8), "pool": d.one(RESIDENT, NUMBER)}


def expected__expert_slots(a):
    ids = a.ids.long().clamp(-1, 2**31 - 1).int().numpy()
    return [Expected(ids if a.pool == RESIDENT else 7 - ids)]


def invalid__expert_slots(zeros):
    return [wrong("the number of a pool of slots, got -3", pool=-3)]
