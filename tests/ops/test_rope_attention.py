"""_rope_attention_: as _rope_cache_ and _cached_attention one after the other."""

import pytest
import torch
from support.oracles_operators import checked
from support.values import EACH_DTYPE, random

from torch_moe_mps.ops.families.attention import _cached_attention, _rope_attention_
from torch_moe_mps.ops.families.rope import _rope_cache_

TURNED = ("attention_turned", "attention_merge")
OF_ATTENTION = ("window", "key_range", "softcap", "sinks", "gate", "gate_activation")


def arguments(device, heads, key_heads, width, keys, dtype, value_width=None, batch=2, tokens=1, spare=3):
    """Caches are slices of larger memory."""
    value_width = value_width or width
    shapes = {"q": (heads, width), "k": (key_heads, width), "v": (key_heads, value_width)}
    made = {n: random((batch, tokens, *shape), dtype, i) for i, (n, shape) in enumerate(shapes.items())}
    for i, (name, size) in enumerate((("keys_", width), ("values_", value_width))):
        made[name] = random((batch, key_heads, keys + spare, size), dtype, 10 + i)
    made |= {name: random((1, tokens, width), torch.float32, 20 + i) for i, name in enumerate(("cos", "sin"))}
    made = {name: value.to(device) for name, value in made.items()}
    made |= {name: made[name][:, :, :keys] for name in ("keys_", "values_")}
    return made | {"scale": width**-0.5}


def check_turned(given: dict) -> None:
    """The same bits in the results and in all memory of the caches."""
    turning = {n: v for n, v in given.items() if n not in (*OF_ATTENTION, "scale")}
    before = {n: given[n]._base.clone() for n in ("keys_", "values_")}
    turned = _rope_cache_(**turning)
    options = {n: given[n] for n in OF_ATTENTION if n in given}
    two = _cached_attention(turned, given["keys_"], given["values_"], scale=given["scale"], **options).cpu()
    after = {n: given[n]._base.cpu() for n in before}
    for name, value in before.items():
        given[name]._base.copy_(value)
    one = checked("_rope_attention_", **given)
    assert torch.equal(one.cpu(), two)
    assert all(torch.equal(given[n]._base.cpu(), after[n]) for n in after)


# Heads, heads of keys, their width, and keys: a block of 8 or of 16 queries for each width; several chunks.
SHAPES = (
    *((8, 2, 64, 20), (8, 1, 128, 300), (4, 2, 256, 30), (2, 1, 512, 9)),
    *((24, 2, 64, 1), (12, 1, 128, 40), (16, 1, 256, 17), (5, 5, 80, 70)),
)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_token(device, shape, dtype):
    norms = {
        n: random((shape[2],), dtype, i).to(device) for i, n in enumerate(("q_norm_weight", "k_norm_weight"))
    }
    check_turned(arguments(device, *shape, dtype) | norms)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_options(device, dtype):
    for i in range(2):
        given = arguments(device, 6, 2, 64, 40, dtype, value_width=32)
        sinks, gate = random((6,), dtype, 1), random((2, 1, 6, 1 if i else 32), dtype, 2)
        check_turned(given | {"window": 7, "sinks": sinks.to(device), "pairs": "interleaved"})
        check_turned(given | {"softcap": 3.0, "gate": gate.to(device), "gate_activation": "softplus"})
        norm = {
            "v_norm_weight": random((32,), dtype, 3).to(device),
            "norm_v": True,
            "norm_weight_offset": 1.0,
        }
        ranges = torch.tensor([[3, 40], [0, 9]], dtype=torch.int32).to(device)
        check_turned(
            given
            | norm
            | {"key_range": ranges, "rotary_last": True, "rotary_dim": 32}
            | {n: given[n][..., :32].contiguous() for n in ("cos", "sin")}
        )
        check_turned(given | {"cos": None, "sin": None})


def test_calls_of_two_launches(simulated):
    """Several tokens, more than 16 queries of a key head, heads of no whole vectors."""
    for change in ({"tokens": 3}, {"heads": 34}, {"width": 36}, {}):
        sizes = {"heads": 8, "key_heads": 2, "width": 64, "keys": 20, "dtype": torch.float32} | change
        given = arguments("mps", **sizes)
        with simulated.trace() as commands:
            _rope_attention_(**given)
        names = [line.split()[0] for line in commands if " grid " in line]
        assert len(names) == (2 if change else 1) and names[0].startswith(TURNED) == (not change)
        check_turned(given)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_same_bits_every_time(device, every_order, dtype):
    given = arguments(device, 8, 1, 64, 300, dtype)
    first, *others = [_rope_attention_(**given).cpu() for _ in every_order()]
    assert all(torch.equal(other, first) for other in others)
