"""Passes in front of a rotation and behind it: on their patterns, and with one thing changed."""

from collections.abc import Callable

import pytest
import torch
from support.graphs import (
    CHANGED,
    NORM,
    assert_left,
    assert_needed,
    changed,
    function_of,
    name_of,
    norm,
    passes_of,
)
from support.values import numbers as random
from torch import Tensor

ops = torch.ops.moe_mps


# Functions of queries, keys and values [B, T, heads, 16], and of what a cache has room in.
BATCH, TOKENS, BEFORE, WIDE = 2, 2, 5, 16


COS, SIN = random(1, TOKENS, WIDE), random(1, TOKENS, WIDE, seed=1)


ANGLES = random(1, TOKENS, WIDE // 2, seed=2)
Q_NORM, K_NORM, LATENT_NORM, LONG_NORM = random(WIDE), random(WIDE, seed=1), random(24), random(4 * WIDE)


def of_heads(x):
    return x.view(BATCH, TOKENS, 8, WIDE).split([4, 2, 2], -2)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def turned(q, k=None, width=None, cos=COS, **options):
    tables = (cos, SIN) if width is None else (cos[..., :width], SIN[..., :width])
    return ops.rope_heads(q, *tables, **options) if k is None else ops.rope(q, k, *tables, **options)


def write(memory: Tensor, new: Tensor) -> Tensor:
    memory.narrow(2, BEFORE, TOKENS).copy_(new)
    return memory.narrow(2, 0, BEFORE + TOKENS)


def seen(q, k, v, keys, values):
    """Attention of heads that stand first, with new keys and values in a cache."""
    return ops.cached_attention(q, write(keys, k), write(values, v), scale=0.25)


def latents(x, keys, values):
    """Normed latents of 24 columns as keys, and 8 that turn as values, side by side."""
    memory = keys.view(BATCH, 1, -1, 32)
    q0, q1 = swapped(x[..., :64].view(BATCH, TOKENS, 4, WIDE)).split([8, 8], -1)
    c, k = x[..., 64:96].split([24, 8], -1)
    c = norm(c, LATENT_NORM).view(BATCH, TOKENS, 1, 24)
    q1, k = turned(swapped(q1), k.unsqueeze(2), 4, rotary_dim=8, pairs="interleaved_to_half")
    torch.cat((swapped(c), k), -1, out=memory.narrow(2, BEFORE, TOKENS))
    return torch.cat((q0, q1), -1), memory[:, :, : BEFORE + TOKENS] * 2


def scaled_latents(x, keys, values):
    """The same, of which all but what turns is scaled, as LongCat's."""
    factor = 1.5
    memory = keys.view(BATCH, 1, -1, 32)
    q0, q1 = swapped(x[..., :64].view(BATCH, TOKENS, 4, WIDE)).split([8, 8], -1)
    c, k = x[..., 64:96].split([24, 8], -1)
    c = (norm(c, LATENT_NORM) * factor).view(BATCH, TOKENS, 1, 24)
    q1, k = turned(swapped(q1), k.unsqueeze(2), 4, rotary_dim=8, pairs="interleaved_to_half")
    torch.cat((swapped(c), k), -1, out=memory.narrow(2, BEFORE, TOKENS))
    return torch.cat((q0, q1), -1), memory[:, :, : BEFORE + TOKENS] * 2


def norms_of_heads(q, k, v, keys, values):
    q, k = swapped(norm(q, Q_NORM)), swapped(norm(k, K_NORM))
    return seen(*turned(swapped(q), swapped(k)), swapped(v), keys, values)


def norms_behind_transpositions(q, k, v, keys, values):
    q, k, v = map(swapped, (q, k, v))
    return seen(*turned(swapped(norm(q, Q_NORM)), swapped(norm(k, K_NORM))), v, keys, values)


def one_by_one(q, k, v, keys, values):
    """As Gemma 4 does it, with a norm of the values."""
    q = swapped(turned(norm(q, Q_NORM)))
    k = swapped(turned(norm(k, K_NORM)))
    return seen(swapped(q), swapped(k), swapped(norm(v, None)), keys, values)


def polar(angles=None):
    """Tables of angles, as Llama 4's code has them."""
    angles = ANGLES if angles is None else angles
    table = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    return table.movedim(-1, 0).contiguous().unbind()


def norms_behind_a_turn(q, k, v, keys, values):
    q, k = ops.rope(q, k, *polar(), pairs="interleaved", rotary_dim=WIDE)
    q, k = (swapped(norm(swapped(x), None)) for x in (q, k))
    return seen(q, k, swapped(v), keys, values)


def norm_of_queries_behind_a_turn(q, k, v, keys, values):
    q, k = ops.rope(q, k, *polar(), pairs="interleaved", rotary_dim=WIDE)
    return seen(swapped(norm(swapped(q), None)), k, swapped(v), keys, values)


def norms_behind_tables_that_stretch(q, k, v, keys, values):
    q, k = ops.rope(q, k, COS[..., :8], SIN[..., :8], pairs="interleaved")
    q, k = (swapped(norm(swapped(x), None)) for x in (q, k))
    return seen(q, k, swapped(v), keys, values)


def norms_behind_tables_of_elements(q, k, v, keys, values):
    """Two elements of a pair have angles of their own."""
    q, k = ops.rope(q, k, *polar(), pairs="interleaved")
    q, k = (swapped(norm(swapped(x), None)) for x in (q, k))
    return seen(q, k, swapped(v), keys, values)


def norms_with_weights_behind_a_turn(q, k, v, keys, values):
    q, k = ops.rope(q, k, *polar(), pairs="interleaved", rotary_dim=WIDE)
    q, k = (swapped(norm(swapped(x), Q_NORM)) for x in (q, k))
    return seen(q, k, swapped(v), keys, values)


def values_first(q, k, v, keys, values):
    q, k = turned(q, k)
    held = write(values, swapped(v))
    return ops.cached_attention(q, write(keys, k), held, scale=0.25)


def queries_scaled_before_the_write(q, k, v, keys, values):
    q, k = turned(q, k)
    return seen(q * 2, k, swapped(v), keys, values)


def values_made_last(q, k, v, keys, values):
    q, k = turned(q, k)
    return seen(q, k, swapped(v * 2), keys, values)


def keys_given_as_queries(q, k, v, keys, values):
    k, q = turned(norm(k, K_NORM), q)
    return seen(q, k, swapped(v), keys, values)


def ends_of_heads(q, k, v, keys, values):
    q, k, v = map(swapped, (q, k, v))
    (q0, q1), (k0, k1) = q.split([8, 8], -1), (k[..., :8], k[..., 8:])
    q1, k1 = turned(swapped(q1), swapped(k1), 4, rotary_dim=8)
    return seen(torch.cat((q0, q1), -1), torch.cat((k0, k1), -1), v, keys, values)


def begins_of_normed_heads(q, k, v, keys, values):
    q = norm(q, Q_NORM)
    q1, k = turned(q[..., :8], k, 8)
    return seen(torch.cat((q1, swapped(q)[..., 8:]), -1), k, swapped(v), keys, values)


# With one thing changed.
def not_turned(q, k, v, keys, values):
    return seen(swapped(norm(q, Q_NORM)), swapped(norm(k, K_NORM)), swapped(v), keys, values)


def not_turned_and_of_one_memory(q, k, v, keys, values):
    q, k, v = map(swapped, (q, k, v))
    memory = keys.narrow(1, 0, 1)
    return ops.cached_attention(q[:, :2], write(memory, k[:, :1]), write(memory, v[:, :1]), scale=0.25)


def not_turned_and_made_late(q, k, v, keys, values):
    """Queries that come after the writes."""
    q, k, v = map(swapped, (q, k, v))
    k, v = write(keys, k), write(values, v)
    return ops.cached_attention(q * 2, k, v, scale=0.25)


def not_turned_and_written_twice(q, k, v, keys, values):
    q, k, v = map(swapped, (q, k, v))
    write(keys, v)
    return seen(q, k, v, keys, values)


def changed_behind_the_write(q, k, v, keys, values):
    q, k, v = map(swapped, (q, k, v))
    q = q.contiguous()
    k, v = write(keys, k), write(values, v)
    row = q[0]
    row.mul_(2)
    return ops.cached_attention(q, k, v, scale=0.25)


def other_eps(q, k, v, keys, values):
    return seen(*turned(norm(q, Q_NORM), ops.rms_norm(k, K_NORM, norm_eps=1e-3)), swapped(v), keys, values)


def offset_of_keys_and_values(q, k, v, keys, values):
    k = ops.rms_norm(k, K_NORM, norm_eps=1e-6, norm_weight_offset=1.0)
    return seen(*turned(q, k), swapped(norm(v, Q_NORM)), keys, values)


def norm_of_all_heads(q, k, v, keys, values):
    q = norm(q.reshape(BATCH, TOKENS, -1), LONG_NORM).view(q.shape)
    return seen(*turned(q, k), swapped(v), keys, values)


def norm_that_is_read(q, k, v, keys, values):
    q = norm(q, Q_NORM)
    return seen(*turned(q, k), swapped(v), keys, values), q


def norm_of_columns(q, k, v, keys, values):
    square = torch.cat((q, k, v, q, k, v), 2)
    q = norm(square, Q_NORM).transpose(2, 3)
    return seen(*turned(q, k), swapped(v), keys, values)


def norm_with_a_late_weight(q, k, v, keys, values):
    return seen(*turned(norm(q, Q_NORM * v[0, 0, 0]), k), swapped(v), keys, values)


def normed_and_changed(q, k, v, keys, values):
    q = q.clone()
    normed = norm(q, Q_NORM)
    changed(q)
    return seen(*turned(normed, k), swapped(v), keys, values)


def other_tables(q, k, v, keys, values):
    q, k = turned(q), turned(k, cos=SIN)
    return seen(q, k, swapped(v), keys, values)


def queries_read_between(q, k, v, keys, values):
    q = turned(q) * 2
    return seen(q, turned(k), swapped(v), keys, values)


def one_after_the_other(q, k, v, keys, values):
    k = turned(swapped(turned(k)))
    return seen(q.transpose(1, 2), k, swapped(v), keys, values)


def changed_between_rotations(q, k, v, keys, values):
    q = q.clone()
    q_out = turned(q)
    changed(q)
    return seen(q_out, turned(k), swapped(v), keys, values)


def three_rotations(q, k, v, keys, values):
    q, k, other = turned(q), turned(k), turned(v)
    return seen(q, k, swapped(v), keys, values), other


def parts_in_other_places(q, k, v, keys, values):
    q1, k = turned(q[..., :8], k, 8)
    return seen(torch.cat((swapped(q)[..., 8:], q1), -1), k, swapped(v), keys, values)


def part_of_another_head(q, k, v, keys, values):
    q1, k = turned(q[..., :8], k, 8)
    return seen(torch.cat((q1, swapped(q).flip(1)[..., 8:]), -1), k, swapped(v), keys, values)


def ends_and_begins(q, k, v, keys, values):
    q1, k = turned(q[..., 8:], k, 8)
    return seen(torch.cat((swapped(q)[..., :8], q1), -1), k, swapped(v), keys, values)


def part_changed_before_it_is_joined(q, k, v, keys, values):
    q, k, v = torch.cat((q, k, v), 2).split([4, 2, 2], 2)
    q1, k = turned(q[..., :8], k, 8)
    changed(q[..., 8:])
    return seen(torch.cat((q1, swapped(q)[..., 8:]), -1), k, swapped(v), keys, values)


def part_that_is_read(q, k, v, keys, values):
    q1, k = turned(q[..., :8], k, 8)
    return seen(torch.cat((q1, swapped(q)[..., 8:]), -1), k, swapped(v), keys, values), q1


def cache_read_before_the_write(q, k, v, keys, values):
    q, k = turned(q, k)
    last = keys * 2
    return seen(q, k, swapped(v), keys, values), last


def keys_read_before_values_are_made(q, k, v, keys, values):
    q, k = turned(q, k)
    v = swapped(v) * write(keys, k).mean()
    return ops.cached_attention(q, keys.narrow(2, 0, BEFORE + TOKENS), write(values, v), scale=0.25)


def keys_read_elsewhere(q, k, v, keys, values):
    q, k = turned(q, k)
    return seen(q, k, swapped(v), keys, values), k


def values_of_the_queries(q, k, v, keys, values):
    q, k = turned(q, k)
    return seen(q, k, q[:, :2] * 2, keys, values)


def values_changed_before_their_write(q, k, v, keys, values):
    v = v.clone()
    q, k = turned(q, k)
    changed(v)
    return seen(q, k, swapped(v), keys, values)


def normed_values_changed(q, k, v, keys, values):
    v = v.clone()
    v_out = norm(v, None)
    changed(v)
    return seen(*turned(q, k), swapped(v_out), keys, values)


def values_of_the_cache(q, k, v, keys, values):
    q, k = turned(q, k)
    return seen(q, k, keys.narrow(2, 0, TOKENS), keys, values)


def one_memory(q, k, v, keys, values):
    q, k = turned(q, k)
    keys.narrow(2, 0, TOKENS).copy_(k)
    keys.narrow(2, 1, TOKENS).copy_(swapped(v))
    return q


def written_by_index(q, k, v, keys, values):
    q, k = turned(q, k)
    keys.index_copy_(2, torch.arange(TOKENS), k)
    values.index_copy_(2, torch.arange(TOKENS), swapped(v))
    return ops.cached_attention(q, keys, values, scale=0.25)


WRITTEN = {"_rope_cache_": 1, "cached_attention": 1}


NOT_WRITTEN = {"rope": 1, "copy_": 2, "cached_attention": 1}


NOT_JOINED = {"rope_heads": 1, "_rope_cache_": 1, "copy_": 1, "cached_attention": 1}


POLAR = {"ones_like": 1, "polar": 1, "clone": 1}
# Norms stay between a turn and the write.
BEFORE_NORMS = {"rope": 1, "rms_norm": 2} | WRITTEN


ROTATIONS: dict[Callable | str, dict[str, int]] = {
    norms_of_heads: WRITTEN,
    norms_behind_transpositions: WRITTEN,
    one_by_one: WRITTEN,
    norms_behind_a_turn: WRITTEN | POLAR,
    norm_of_queries_behind_a_turn: WRITTEN | POLAR,
    norms_behind_tables_that_stretch: BEFORE_NORMS,
    norms_behind_tables_of_elements: BEFORE_NORMS | POLAR,
    norms_with_weights_behind_a_turn: WRITTEN | POLAR | {"rope": 1},
    values_first: WRITTEN,
    queries_scaled_before_the_write: WRITTEN | {"mul": 1},
    values_made_last: WRITTEN | {"mul": 1},
    keys_given_as_queries: WRITTEN,
    ends_of_heads: WRITTEN,
    begins_of_normed_heads: WRITTEN,
    not_turned: WRITTEN,
    "seen(*map(swapped, (q, k, v)), keys, values)": WRITTEN,
    not_turned_and_of_one_memory: {"copy_": 2, "cached_attention": 1},
    not_turned_and_made_late: {"copy_": 2, "cached_attention": 1, "mul": 1},
    not_turned_and_written_twice: {"copy_": 3, "cached_attention": 1},
    changed_behind_the_write: {"copy_": 2, "cached_attention": 1, "clone": 1, "mul_": 1},
    other_eps: WRITTEN | {"rms_norm": 1},
    offset_of_keys_and_values: WRITTEN | {"rms_norm": 1},
    norm_of_all_heads: WRITTEN | {"rms_norm": 1},
    norm_that_is_read: WRITTEN | {"rms_norm": 1},
    norm_of_columns: WRITTEN | {"rms_norm": 1, "cat": 1},
    norm_with_a_late_weight: WRITTEN | {"rms_norm": 1, "mul": 1},
    normed_and_changed: WRITTEN | CHANGED | {"clone": 1, "rms_norm": 1},
    other_tables: NOT_JOINED,
    queries_read_between: NOT_JOINED | {"mul": 1},
    one_after_the_other: NOT_JOINED,
    changed_between_rotations: NOT_JOINED | CHANGED | {"clone": 1},
    three_rotations: WRITTEN | {"rope_heads": 1},
    parts_in_other_places: WRITTEN | {"cat": 1},
    part_of_another_head: WRITTEN | {"cat": 1, "flip": 1},
    ends_and_begins: WRITTEN | {"cat": 1},
    part_changed_before_it_is_joined: NOT_WRITTEN | CHANGED | {"cat": 2},
    part_that_is_read: WRITTEN | {"cat": 1},
    cache_read_before_the_write: NOT_WRITTEN | {"mul": 1},
    keys_read_before_values_are_made: NOT_WRITTEN | {"mean": 1, "mul": 1},
    keys_read_elsewhere: NOT_WRITTEN,
    values_of_the_queries: NOT_WRITTEN | {"mul": 1},
    values_changed_before_their_write: NOT_WRITTEN | CHANGED | {"clone": 1},
    normed_values_changed: WRITTEN | CHANGED | {"clone": 1, "rms_norm": 1},
    values_of_the_cache: NOT_WRITTEN,
    one_memory: {"rope": 1, "copy_": 2},
    "seen(*turned(q, k), swapped(v), keys.clone(), values)": NOT_WRITTEN | {"clone": 1},
    "(turned(q), turned(k.half()))": {"rope_heads": 2, "_to_copy": 1},
    "seen(*turned(q, k), swapped(v[:, :, :1]), keys, values)": NOT_WRITTEN,
    "seen(*turned(q, k), swapped(v).double(), keys, values)": NOT_WRITTEN | {"_to_copy": 1},
    written_by_index: {"rope": 1, "arange": 1, "index_copy_": 2, "cached_attention": 1},
}


def of_a_cache() -> tuple[Tensor, Tensor, Tensor]:
    shape = (BATCH, 2, BEFORE + TOKENS + 2, WIDE)
    return random(BATCH, TOKENS, 8 * WIDE), random(*shape), random(*shape, seed=1)


def behind_a_projection(case: Callable | str) -> Callable:
    function = function_of(case, "q, k, v, keys, values", **globals())
    return lambda x, keys, values: function(*of_heads(x), keys, values)


@pytest.mark.parametrize("case", ROTATIONS, ids=name_of)
def test_rotations_and_the_write_into_a_cache(case):
    assert_left(ROTATIONS[case], behind_a_projection(case), *of_a_cache())


def test_a_rotation_and_a_norm_side_by_side_in_a_cache():
    for each in (latents, scaled_latents):
        assert_left({"_rope_cache_": 1, "mul": 1}, each, *of_a_cache())


def pool(of):
    return turned(of, norm_weight=NORM[:WIDE], norm_eps=1e-5, norm_weight_offset=1.0)


def pool_written(x, keys, values):
    """As the keys of an indexer's pools, which have no dimension for heads."""
    pools = keys[:, 0]
    pools.narrow(1, 1, TOKENS).copy_(pool(x[..., :WIDE].unsqueeze(2)).squeeze(1))
    return pools.sum(1)


def pool_that_is_read(x, keys, values):
    made = pool(x[..., :WIDE].unsqueeze(2))
    keys[:, :1].narrow(2, 1, TOKENS).copy_(made)
    return made + 1


def pool_of_the_cache(x, keys, values):
    keys[:, :1].narrow(2, 1, TOKENS).copy_(pool(swapped(keys[:, :1, :TOKENS])))
    return x


def pool_changed_before_its_write(x, keys, values):
    x = x.clone()
    made = pool(x[..., :WIDE].unsqueeze(2))
    x.mul_(2)
    keys[:, :1].narrow(2, 1, TOKENS).copy_(made)
    return x


def pool_written_twice(x, keys, values):
    made = pool(x[..., :WIDE].unsqueeze(2))
    keys[:, :1].narrow(2, 0, TOKENS).copy_(made)
    values[:, :1].narrow(2, 0, TOKENS).copy_(made)
    return x


def pool_in_another_dtype(x, keys, values):
    keys[:, :1].narrow(2, 0, TOKENS).copy_(pool(x[..., :WIDE].unsqueeze(2).half()))
    return x


def pool_for_every_head(x, keys, values):
    keys.narrow(2, 0, TOKENS).copy_(pool(x[..., :WIDE].unsqueeze(2)))
    return x


ALONE = {"rope_heads": 1, "copy_": 1}


POOLS: dict[Callable | str, dict[str, int]] = {
    pool_written: {"_rope_cache_": 1, "sum": 1},
    pool_that_is_read: ALONE | {"add": 1},
    pool_of_the_cache: ALONE,
    pool_changed_before_its_write: ALONE | {"clone": 1, "mul_": 1},
    pool_written_twice: ALONE | {"copy_": 2},
    pool_in_another_dtype: ALONE | {"_to_copy": 1},
    pool_for_every_head: ALONE,
}


@pytest.mark.parametrize("case", POOLS, ids=name_of)
def test_a_rotation_alone_and_its_write_into_a_cache(case):
    assert_left(POOLS[case], case, *of_a_cache())


@pytest.mark.parametrize("left_out", [*passes_of("rotation"), *passes_of("llama4")], ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(
        left_out, ((behind_a_projection(case), of_a_cache(), left) for case, left in ROTATIONS.items())
    )
