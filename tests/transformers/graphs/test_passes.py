"""Passes on a recorded token: each on its pattern, and on one with a thing changed that must stay."""

from collections.abc import Callable

import pytest
import torch
from support.graphs import NO_CHAINS, assert_computes, assert_left, operators, recorded
from support.values import numbers as random
from torch import Tensor
from torch.nn.functional import silu, softplus

from torch_moe_mps.quantization import quantize
from torch_moe_mps.transformers.graphs import passes
from torch_moe_mps.transformers.graphs.fusion import Fusion
from torch_moe_mps.transformers.graphs.passes import PASSES, simplify
from torch_moe_mps.transformers.graphs.patterns import match
from torch_moe_mps.transformers.graphs.tracing import Recorder, key_of
from torch_moe_mps.transformers.modules.rules.rotary import rotary_tables

ops = torch.ops.moe_mps
H, E, K, I = 64, 8, 2, 32
FORMAT = "affine4_32"


QUANTIZED = quantize(random(H, H, seed=2) / 8, 4, 32)
MATRIX = QUANTIZED.packed, QUANTIZED.scales, QUANTIZED.biases
NORM, OTHER_NORM, ROUTER, SCALES = random(H), random(H, seed=1), random(E, H) / 8, random(E)
WEIGHTS = random(E, 2 * I, H) / 8, random(E, H, I) / 8
LARGE, MIXING = random(514, H) / 8, (random(24, H) / 8, random(24), random(3))
GATE = random(1, H)
POSITIONS = torch.arange(27).view(3, 1, 9)  # of seven tokens before, and of two new ones
FREQUENCIES, AXES = random(4), torch.eye(3)[1:, [0, 1, 2, 0]]
FUNCTIONS = dict.fromkeys(each for each in PASSES if not isinstance(each, Fusion))  # not made of formulas


def linear(x: Tensor, **options) -> Tensor:
    return ops.linear_quantized(x, *MATRIX, FORMAT, **options)


PARAMETERS = [
    [torch.nn.Parameter(each, requires_grad=False) for each in (one.packed, one.scales, one.biases)]
    for one in (quantize(random(rows, H), 4, 32) for rows in (H, 2 * H))
]


ROWS = [torch.nn.Parameter(random(rows, H) / 8, requires_grad=False) for rows in (E, 1, 514, 515)]


def projected(x: Tensor, number: int) -> Tensor:
    return ops.linear_quantized(x, *PARAMETERS[number], FORMAT)


def norm(x: Tensor, weight: Tensor | None = NORM) -> Tensor:
    return ops.rms_norm(x, weight, 1e-6)


def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return ops.moe_experts(x, *WEIGHTS, ids, weights)


def routed(x: Tensor) -> Tensor:
    """Experts behind a router that casts its results."""
    logits = torch.nn.functional.linear(x, ROUTER)
    weights, ids = ops.moe_router(logits, K, scoring="softmax", norm_topk_prob=True)
    return experts(x, ids.long(), weights.half())


def residual_in_place(x, r):
    out = linear(x)
    out += r
    return out


def numbers_that_are_no_positions(x, r):
    return (
        torch.arange(3) + 5.0,
        torch.arange(3.0) + 5,
        torch.arange(3) + r.view(-1)[:3],
        torch.arange(1, 3) + 5,
        torch.add(torch.arange(3), 5, alpha=2),
    )


def tables() -> tuple[Tensor, Tensor]:
    return rotary_tables(POSITIONS, FREQUENCIES, 1.0, torch.float32, "halves", AXES)


def tables_of_new_tokens(x, r):
    cos, sin = tables()
    return cos[:, -2:] + sin[:, -2:]


def tables_of_new_and_some_other_tokens(x, r):
    cos, sin = tables()
    return cos[:, -2:] + sin[:, -2:], cos[:, 1:8:3] + sin[:, 1:8:3], sin[:, -3:-1]


def tables_of_new_and_one_of_all_tokens(x, r):
    cos, sin = tables()
    return cos[:, -2:] + sin[:, -2:], sin


def columns_of_tables(x, r):
    cos, sin = tables()
    return cos[..., :2], sin[..., :2]


def tables_that_change(x, r):
    cos, sin = tables()
    shown = cos[:, -2:]
    cos[:, -1:].mul_(2)
    return shown, sin[:, -2:]


def norm_of_input(x, r):
    normed = norm(x)
    return linear(normed), linear(normed)


def norm_of_router_and_experts(x, r):
    normed = norm(x).view(1, H)
    return routed(normed)


def norm_that_else_is_read(x, r):
    normed = norm(x)
    return linear(normed), normed


def norm_of_what_changes(x, r):
    x = x.clone()
    row, normed = x.view(-1), norm(x)
    row.add_(1)
    return linear(normed), x


def norm_of_sum_with_weights_of_rows(x, r):
    total = x.view(1, 2, -1) + r.view(1, 2, -1)
    return norm(total, NORM.view(2, -1)), total


def linears_of_one_input(x, r):
    a, b = projected(x, 0), projected(x, 1)
    return a.view(1, 1, 2, -1).transpose(1, 2), b * 2


def router_and_gate_of_one_input(x, r):
    row = norm(x[0])
    return tuple(torch.nn.functional.linear(row, each) for each in ROWS[:2])


def linears_of_a_normed_input(x, r):
    normed = norm(x)
    return projected(normed, 0), projected(normed, 1)


def linears_of_an_input_that_changes(x, r):
    x = x.clone()
    row, a = x.view(-1), projected(x, 0)
    row.add_(1)
    return a, projected(x, 1)


def linears_without_parameters(x, r):
    return linear(x) * ops.linear_quantized(x, *(each.data for each in PARAMETERS[0]), FORMAT)


def activation_of_the_first_outputs(x, r):
    first, second = projected(x, 0), projected(x, 1)
    return silu(first.view(1, H) / 4), second + 1


def gelu_of_outputs(x, r):
    first, second = projected(x, 0), projected(x, 1)
    return torch.nn.functional.gelu(first), second + 1


def gelu_by_tanh_of_outputs(x, r):
    return torch.nn.functional.gelu(linear(x), approximate="tanh") * r


def activation_of_the_last_outputs(x, r):
    first, second = projected(x, 0), projected(x, 1)
    return first + 1, silu(second)


def activation_of_what_is_read_elsewhere(x, r):
    y = linear(x)
    return silu(y), y * 2


def activation_of_a_quotient_that_is_read_elsewhere(x, r):
    y = linear(x) / 4
    return silu(y), y * 2


def activation_of_a_part_that_is_read_elsewhere(x, r):
    y = linear(x)
    return silu(y / 4), y * 2


def activation_that_changes(x, r):
    y = silu(linear(x))
    y.view(-1).mul_(2)
    return y


def outputs_in_another_order(x, r):
    """As Qwen3-Next has them: q, k and v of each head side by side."""
    q, k, v = projected(x, 1).view(1, 1, 2, 64).split([16, 16, 32], 3)
    return torch.cat([each.reshape(1, 1, -1) for each in (q, k)], -1), v.reshape(-1, 32) * 2


def outputs_in_order_and_as_they_are(x, r):
    out = projected(x, 1)
    return out.view(1, 1, 2, 64).transpose(2, 3).reshape(1, 1, 128), out


def outputs_that_are_given_twice(x, r):
    a, b = projected(x, 1).chunk(2, -1)
    return torch.cat([a, b, a], -1)


def outputs_in_order_that_change(x, r):
    return changed(projected(x, 1).view(1, 1, 2, 64).transpose(2, 3).reshape(1, 1, 128))


def norm_in_sum_and_operator(x, r):
    total = r + linear(x)
    return linear(norm(total)), total


def whole_layer(x, r):
    total = r + linear(norm(x))
    return total + routed(norm(total, OTHER_NORM).view(1, H)).view(1, 1, H)


def gate(x, r):
    """Gemma 4's router."""
    logits = torch.nn.functional.linear(norm(x[0], None) * NORM * 0.125, ROUTER)
    weights, ids = torch.topk(torch.softmax(logits, -1), K)
    weights /= weights.sum(-1, keepdim=True)
    return experts(x[0], ids, weights * SCALES[ids])


def gate_that_scales_otherwise(x, r):
    logits = torch.nn.functional.linear(norm(x[0], None) * NORM * 0.125, ROUTER)
    weights, ids = torch.topk(torch.softmax(logits, -1), K)
    weights = weights / weights.sum(-1, keepdim=True)
    return experts(x[0], ids, weights + SCALES[ids])


def changed(value: Tensor) -> Tensor:
    """In place, by an operator that stays one: its arguments differ in dtype."""
    return value.masked_fill_(value > value.mean(), 0)


def weights_changed_behind_their_cast(x, r):
    weights, ids = ops.moe_router(
        torch.nn.functional.linear(x[0], ROUTER), K, scoring="softmax", norm_topk_prob=True
    )
    return experts(x[0], ids, changed(weights.half()))


def gate_of_changed_scores(x, r):
    logits = torch.nn.functional.linear(norm(x[0], None) * NORM * 0.125, ROUTER)
    weights, ids = torch.topk(changed(torch.softmax(logits, -1)), K)
    weights /= weights.sum(-1, keepdim=True)
    return experts(x[0], ids, weights * SCALES[ids])


def norm_of_two_rows(x, r):
    """Wider than the rows that the operator reads."""
    normed = norm(torch.cat([x, r], -1), torch.cat([NORM, OTHER_NORM]))
    return linear(normed.view(2, H))


def norm_of_sum_with_a_late_weight(x, r):
    total = x + r
    return norm(total, NORM * r.view(-1)), total


def norm_before_scaled_sum(x, r):
    normed = norm(x[0])
    return torch.addmm(GATE[0, :1], normed, GATE.t(), beta=2), linear(normed)


def norm_before_sum_of_rows(x, r):
    normed = norm(x[0])
    return torch.addmm(r[0, :, :1], normed, GATE.t()), linear(normed)


def norm_before_small_matrix(x, r):
    normed = norm(x[0])
    return torch.nn.functional.linear(normed, ROUTER), linear(normed)


def norm_before_large_matrix(x, r):
    normed = norm(x[0])
    return torch.nn.functional.linear(normed, LARGE), linear(normed)


def mask_of_none_alone(x, r):
    return (torch.zeros(1, dtype=torch.bool) & (x > r)) | (x > 0)


def lowest_bits(x, r):
    return torch.ones(1, dtype=torch.int32) & (x * 8).int()


def sum_times_one_beside_the_sum(x, r):
    total = x + r
    return total * 1.0, total


def sum_times_ones_that_change(x, r):
    mask = torch.ones(1, 1, H)
    mask.view(-1)[:2].mul_(2)
    return (x + r) * mask


def mixed_streams(x, r, turned=True):
    """As DeepSeek-V4 computes them."""
    streams = x.view(1, 1, 4, -1)
    _, post, comb, _ = ops.hyper_connection(streams, *MIXING)
    mixed = torch.matmul(comb.transpose(-1, -2) if turned else comb, streams)
    return post.unsqueeze(-1) * r[..., : H // 4].unsqueeze(-2) + mixed


def streams_between_layers(x, r):
    streams = mixed_streams(x, r)
    return ops.hyper_connection(streams, *MIXING)[0], streams


def streams_read_before_the_next_layer(x, r):
    streams = mixed_streams(x, r)
    return streams * 2, ops.hyper_connection(streams, *MIXING)[0]


def conjugates(x, r):
    pairs = torch.view_as_complex(x.view(-1, 2))
    return torch.view_as_real((pairs * pairs.conj() + pairs).resolve_conj())


def equal_calls_of_a_changed_input(x, r):
    before = torch.sin(x) * r
    x.view(-1)[:3].add_(1)
    return before, torch.sin(x) * r


def equal_calls_of_a_changed_result(x, r):
    one, two = torch.sin(x), torch.sin(x)
    two.view(-1)[:3].add_(1)
    return one * r, two * r


def equal_calls_whose_first_changes(x, r):
    one, two = torch.sin(x), torch.sin(x)
    one.view(-1)[:3].add_(1)
    return one * r, two * r


LINEAR = {"linear_quantized": 1}
MEAN = {"sigmoid": 1, "mul": 1, "mean": 1}
CHANGED = {"gt": 1, "mean": 1, "masked_fill_": 1}
EXPERTS = {"mm": 1, "moe_router": 1, "moe_experts": 1}
CASES: dict[Callable | str, dict[str, int]] = {
    residual_in_place: LINEAR,
    "silu(linear(x, residual=r))": {"linear_quantized": 1, "silu": 1},
    "silu(linear(x, activation='silu'))": {"linear_quantized": 1, "silu": 1},
    numbers_that_are_no_positions: {"arange": 3, "add": 5},
    tables_of_new_tokens: {"_pointwise": 2, "add": 1},
    tables_of_new_and_some_other_tokens: {"_pointwise": 5, "add": 2},
    tables_of_new_and_one_of_all_tokens: {"_pointwise": 2, "add": 1},
    columns_of_tables: {"_pointwise": 2},
    tables_that_change: {"_pointwise": 2, "mul_": 1},
    norm_of_input: {"linear_quantized": 2},
    norm_of_router_and_experts: {"router_logits": 1, "moe_router": 1, "moe_experts": 1},
    norm_that_else_is_read: LINEAR | {"rms_norm": 1},
    norm_of_what_changes: LINEAR | {"rms_norm": 1, "clone": 1, "add_": 1},
    norm_of_sum_with_weights_of_rows: {"rms_norm": 1, "add": 1},
    linears_of_one_input: LINEAR | {"mul": 1},
    linears_of_a_normed_input: LINEAR,
    router_and_gate_of_one_input: {"router_logits": 1},
    linears_of_an_input_that_changes: {"linear_quantized": 2, "clone": 1, "add_": 1},
    linears_without_parameters: {"linear_quantized": 2, "mul": 1},
    activation_of_the_first_outputs: LINEAR | {"add": 1},
    gelu_of_outputs: LINEAR | {"add": 1},
    gelu_by_tanh_of_outputs: LINEAR | {"mul": 1},
    activation_of_the_last_outputs: LINEAR | {"add": 1, "silu": 1},
    activation_of_what_is_read_elsewhere: LINEAR | {"silu": 1, "mul": 1},
    activation_of_a_quotient_that_is_read_elsewhere: LINEAR | {"div": 1, "silu": 1, "mul": 1},
    activation_of_a_part_that_is_read_elsewhere: LINEAR | {"div": 1, "silu": 1, "mul": 1},
    activation_that_changes: LINEAR | {"silu": 1, "mul_": 1},
    outputs_in_another_order: LINEAR | {"mul": 1},
    outputs_in_order_and_as_they_are: LINEAR | {"clone": 1, "_unsafe_view": 1},
    outputs_that_are_given_twice: LINEAR | {"cat": 1},
    outputs_in_order_that_change: LINEAR | CHANGED | {"clone": 1, "_unsafe_view": 1},
    norm_in_sum_and_operator: {"linear_quantized": 2},
    whole_layer: {"linear_quantized": 1, "router_logits": 1, "moe_router": 1, "moe_experts": 1},
    gate: {"mul": 1, "moe_gate": 1, "moe_experts": 1},
    weights_changed_behind_their_cast: EXPERTS | CHANGED | {"_to_copy": 1},
    norm_of_two_rows: LINEAR | {"cat": 2, "rms_norm": 1},
    norm_of_sum_with_a_late_weight: {"add": 1, "mul": 1, "rms_norm": 1},
    norm_before_scaled_sum: LINEAR | {"rms_norm": 1, "addmm": 1},
    norm_before_sum_of_rows: LINEAR | {"rms_norm": 1, "addmm": 1},
    norm_before_small_matrix: LINEAR | {"router_logits": 1},
    norm_before_large_matrix: LINEAR | {"rms_norm": 1, "mm": 1},
    mask_of_none_alone: {"zeros": 1, "gt": 2, "bitwise_and": 1, "bitwise_or": 1},
    lowest_bits: {"ones": 1, "mul": 1, "_to_copy": 1, "bitwise_and": 1},
    sum_times_one_beside_the_sum: {"add": 1, "mul": 1},
    sum_times_ones_that_change: {"add": 1, "ones": 1, "mul_": 1, "mul": 1},
    streams_between_layers: {"hyper_connection": 2},
    streams_read_before_the_next_layer: {"hyper_connection": 2, "hyper_update": 1, "mul": 1},
    conjugates: {"mul": 1, "add": 1, "clone": 1},
    "torch.arange(3) + 5": {"arange": 1},
    "r + norm(x).view(torch.int32).float()": {"rms_norm": 1, "_to_copy": 1, "add": 1},
    "linear(norm(x, None))": LINEAR | {"rms_norm": 1},
    "torch.nn.functional.linear(x[0], ROWS[2]), torch.nn.functional.linear(x[0], ROWS[3])": {"mm": 2},
    "projected(x, 0), projected(r, 1)": {"linear_quantized": 2},
    "r + silu(linear(x))": LINEAR,
    "silu(linear(x) + r)": LINEAR | {"silu": 1},
    "silu(linear(x).double())": LINEAR | {"_to_copy": 1, "silu": 1},
    "silu(linear(x) / r)": LINEAR | {"div": 1, "silu": 1},
    'silu(torch.div(linear(x), 0.25, rounding_mode="floor"))': LINEAR | {"div": 1, "silu": 1},
    "silu(silu(linear(x)))": LINEAR | {"silu": 1},
    "torch.cat([projected(x, 0), r], -1)": LINEAR | {"cat": 1},
    "(x + r) * torch.ones(1, 1, dtype=torch.bool)[:, :, None]": {"add": 1},
    "(x + r) * torch.ones(1, 5)[:, -1:].bool()[:, :, None]": {"add": 1},
    "(x + r) * torch.ones(1, H, 2).select(2, 1)": {"add": 1},
    "(x + r) * torch.ones(H, dtype=torch.int32).view(torch.float32)": {"add": 1, "ones": 1, "mul": 1},
    "torch.zeros(1, dtype=torch.bool) | (torch.ones(1, dtype=torch.bool) & (x > r))": {"gt": 1},
    "(x + r) - 0": {"add": 1},
    "torch.ops.aten.sub.Scalar(torch.ops.aten.sub.Scalar(x + r, 0, 3), 1, 3)": {"add": 1, "sub": 1},
    "torch.zeros(1) - (x + r)": {"zeros": 1, "add": 1, "sub": 1},
    "(x + r) * torch.ones(1, dtype=torch.float64)": {"add": 1, "ones": 1, "mul": 1},
    "x * 1": {"mul": 1},
}
# Of equal calls, which run once, with the same bits.
EQUAL: dict[Callable | str, dict[str, int]] = {
    "torch.cos(torch.sin(x)) * r, torch.cos(torch.sin(x)) + r": {"sin": 1, "cos": 1, "mul": 1, "add": 1},
    equal_calls_of_a_changed_input: {"sin": 2, "mul": 2, "add_": 1},
    equal_calls_of_a_changed_result: {"sin": 2, "mul": 2, "add_": 1},
    equal_calls_whose_first_changes: {"sin": 2, "mul": 2, "add_": 1},
    "x.max(-1)[0] * r, x.max(-1)[0] + r, x.max(-1)[1]": {"max": 1, "mul": 1, "add": 1},
    "torch.sin(x), torch.sin(x) + r": {"sin": 1, "add": 1},
    "torch.sin(x), torch.sin(x).view(-1)": {"sin": 2},  # their reader may write into either
    "torch.add(r, 1), torch.add(r, 1.0) * r, torch.add(r, True) * x": {"add": 3, "mul": 2},
    "torch.pow(x, 0.0) * r, torch.pow(x, -0.0) * r": {"pow": 2, "mul": 2},
    "torch.rand_like(x) * r, torch.rand_like(x) * r": {"rand_like": 2, "mul": 2},
}


def test_a_conjugate_is_recorded_again_as_at_first():
    """Whoever reads it gets it by a copy, also where what operators gave is remembered."""
    graphs = [recorded(conjugates, random(1, 1, H), random(1, 1, H)) for _ in range(2)]
    assert operators(graphs[1]) == operators(graphs[0]) == {"mul": 1, "add": 1, "clone": 1}


def name_of(case: Callable | str) -> str:
    return case if isinstance(case, str) else case.__name__


def function_of(case: Callable | str, names: str = "x, r") -> Callable:
    return eval(f"lambda {names}: ({case})") if isinstance(case, str) else case


TOKEN = random(1, 1, H), random(1, 1, H, seed=1)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    tolerance = 1e-3 if "moe_router" in CASES[case] else 1e-6  # its weights rounded
    assert_left(CASES[case], function_of(case), *TOKEN, without=NO_CHAINS, tolerance=tolerance)


def test_a_number_is_the_same_as_a_symbol_for_it():
    number = Recorder().symbol(5, 2)
    assert key_of([number - number + 7, number]) == key_of([7, number]) != key_of([number, 7])


@pytest.mark.parametrize("case", EQUAL, ids=name_of)
def test_equal_calls_run_once(case):
    assert_left(EQUAL[case], function_of(case), *TOKEN, without=NO_CHAINS, tolerance=0.0)


@pytest.mark.parametrize("function", [gate_that_scales_otherwise, gate_of_changed_scores])
def test_a_gate_of_another_formula_stays(function):
    graph = recorded(function, random(1, 1, H), random(1, 1, H))
    simplify(graph)
    assert operators(graph)["moe_gate"] == 0 and operators(graph)["topk"] == 1


def test_linears_whose_outputs_are_seen_as_rows_of_heads():
    """Of two tokens the joined result's parts have no such view."""
    x = random(1, 2, H)
    assert_left({"linear_quantized": 2}, lambda x: (projected(x, 0).view(-1, 16), projected(x, 1)), x)
    assert_left(LINEAR, lambda x: (projected(x, 0).view(1, 2, -1, 16), projected(x, 1)), x)


def test_gates_of_streams_of_two_tokens_stay():
    """Their operator would read the weights for each."""

    def function(x, r):
        return (torch.sigmoid(linear(x)).view(1, 2, 4, 16) * r).mean(-2)

    assert_left(LINEAR | MEAN, function, random(1, 2, H), random(1, 2, 4, 16), without=NO_CHAINS)


def test_routers_of_two_tokens_stay():
    """Their operator would copy its part of the rows."""
    assert_left({"mm": 2}, lambda x: tuple(torch.nn.functional.linear(x, r) for r in ROWS[:2]), random(2, H))


def test_linears_of_which_another_program_has_joined_some():
    matrices = [
        [torch.nn.Parameter(part, requires_grad=False) for part in (one.packed, one.scales, one.biases)]
        for one in (quantize(random(rows, H), 4, 32) for rows in (H, 2 * H, H))
    ]

    def outputs(x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(ops.linear_quantized(x, *matrix, FORMAT) for matrix in matrices[:count])

    for count, left in ((2, 1), (3, 2)):
        assert_left({"linear_quantized": left}, lambda x, n=count: outputs(x, n), random(1, 1, H))


def test_norms_of_several_tokens_stay():
    """Each operator would have to norm all of them again."""
    left = {"rms_norm": 1, "linear_quantized": 2}
    assert_left(left, norm_of_input, random(1, 3, H), random(1, 3, H))


def test_norms_with_weights_of_another_dtype():
    """Those in float32 join products in 16 bits; others would be a launch for each product."""
    halves, narrow = quantize(random(H, H).half() / 8, 4, 32), NORM.half()

    def joined(x):
        normed = norm(x)
        return ops.linear_quantized(normed, halves.packed, halves.scales, halves.biases, FORMAT)

    def apart(x):
        return linear(norm(x, narrow))

    assert_left(LINEAR, joined, random(1, 1, H).half(), tolerance=1e-3)
    assert_left(LINEAR | {"rms_norm": 1}, apart, random(1, 1, H))


HEADS, WIDTH = 2, 32
DECAY, BIAS, HEAD_NORM = random(HEADS).exp(), random(HEADS), random(WIDTH)


def gated_delta_rule(x, r, state):
    """The gates in front of a delta rule, the norm behind it, and the state that its cache takes back."""
    q, k, v, z = (x.view(1, 1, HEADS, WIDTH) * n for n in range(1, 5))
    beta = r[..., HEADS : 2 * HEADS].sigmoid()
    held = state.clone()
    out = ops.gated_delta_rule_(q, k, v, decay(r[..., :HEADS]), held, 0.25, beta=beta)
    state.copy_(held)
    normed = ops.rms_norm_gated(out.reshape(-1, WIDTH), z.reshape(-1, WIDTH), HEAD_NORM, 1e-6)
    return normed.view(1, 1, -1)


def _updated(x, state):
    q, held = x.view(1, 1, HEADS, WIDTH), state.clone()
    strengths = x[..., :HEADS]
    return ops.gated_delta_rule_(q, q, q, strengths, held, 0.25, beta=strengths), held


def read_before_it_is_back(x, r, state):
    out, held = _updated(x, state)
    last = state * 2
    state.copy_(held)
    return out, last


def changed_when_it_is_back(x, r, state):
    """The state that the cache keeps is not the one that changes."""
    out, held = _updated(x, state)
    state.copy_(held)
    ops.gated_delta_rule_(out, out, out, x[..., :HEADS], held, 0.25, beta=x[..., :HEADS])
    return held * 2


COPIED = {"clone": 1, "copy_": 1, "gated_delta_rule_": 1}


@pytest.mark.parametrize(
    "function,left",
    [
        (gated_delta_rule, {"mul": 4, "gated_delta_rule_": 1}),
        (read_before_it_is_back, COPIED | {"mul": 1}),
        (changed_when_it_is_back, COPIED | {"gated_delta_rule_": 2, "mul": 1}),
    ],
)
def test_gated_delta_rule(function, left):
    state = random(1, HEADS, WIDTH, WIDTH)
    assert_left(left, function, random(1, 1, H), random(1, 1, H, seed=1), state)


def decay(a):
    return -DECAY.exp() * softplus(a.float() + BIAS)


def test_formulas():
    def function(x):
        y = torch.softmax((x * 2.0).to(torch.float64).view(2, 4), -1)
        return x + y.float().view(8)

    (*_, total) = (n for n in recorded(function, random(8)).nodes if n.op == "call_function")
    found = match("_softmax(X * 2.0, -1, False) + Y", total)
    assert found["X"] is found["Y"] and found["X"].op == "placeholder"
    assert match("Y + _softmax(X * 2.0, -1, False)", total) == found
    for other in ("_softmax(X * 3.0, -1, False) + Y", "_softmax(X * 2.0, 0, False) + Y", "X - Y", "X + X"):
        assert match(other, total) is None


def test_a_gate_is_read_where_it_lies():
    """As a query's matrix makes query and gate of each head: its copies only make it contiguous."""

    def function(q, k, g):
        wide = g.view(1, 1, 4, 32)[..., 16:]
        out = ops.attention(q, k, k, 0.25)
        return out.reshape(1, 1, 64) * torch.sigmoid(wide.reshape(1, 1, 64))

    inputs = random(1, 4, 1, 16), random(1, 1, 9, 16), random(1, 1, 128)
    assert_left({"attention": 1}, function, *inputs, without=NO_CHAINS)


# Functions of queries, keys and values [B, T, heads, 16], and of what a cache has room in.
BATCH, TOKENS, BEFORE, WIDE = 2, 2, 5, 16
COS, SIN = random(1, TOKENS, WIDE), random(1, TOKENS, WIDE, seed=1)
Q_NORM, K_NORM, LATENT_NORM, LONG_NORM = random(WIDE), random(WIDE, seed=1), random(24), random(4 * WIDE)


def of_heads(x):
    return x.view(BATCH, TOKENS, 8, WIDE).split([4, 2, 2], -2)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def turned(q, k=None, width=None, cos=COS, **options):
    tables = (cos, SIN) if width is None else (cos[..., :width], SIN[..., :width])
    q, k_out = ops.rope(q, k, *tables, **options)
    return q if k is None else (q, k_out)


def write(memory: Tensor, new: Tensor) -> Tensor:
    memory.narrow(2, BEFORE, TOKENS).copy_(new)
    return memory.narrow(2, 0, BEFORE + TOKENS)


def seen(q, k, v, keys, values):
    """Attention of heads that stand first, with new keys and values in a cache."""
    return ops.attention(q, write(keys, k), write(values, v), 0.25)


def latents(x, keys, values):
    """Normed latents of 24 columns as keys, and 8 that turn as values, side by side."""
    memory = keys.view(BATCH, 1, -1, 32)
    q0, q1 = swapped(x[..., :64].view(BATCH, TOKENS, 4, WIDE)).split([8, 8], -1)
    c, k = x[..., 64:96].split([24, 8], -1)
    c = norm(c, LATENT_NORM).view(BATCH, TOKENS, 1, 24)
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


def values_first(q, k, v, keys, values):
    q, k = turned(q, k)
    held = write(values, swapped(v))
    return ops.attention(q, write(keys, k), held, 0.25)


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
    return ops.attention(q[:, :2], write(memory, k[:, :1]), write(memory, v[:, :1]), 0.25)


def not_turned_and_made_late(q, k, v, keys, values):
    """Queries that come after the writes."""
    q, k, v = map(swapped, (q, k, v))
    k, v = write(keys, k), write(values, v)
    return ops.attention(q * 2, k, v, 0.25)


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
    return ops.attention(q, k, v, 0.25)


def other_eps(q, k, v, keys, values):
    return seen(*turned(norm(q, Q_NORM), ops.rms_norm(k, K_NORM, 1e-3)), swapped(v), keys, values)


def offset_of_keys_and_values(q, k, v, keys, values):
    k = ops.rms_norm(k, K_NORM, 1e-6, 1.0)
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
    return ops.attention(q, keys.narrow(2, 0, BEFORE + TOKENS), write(values, v), 0.25)


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
    return ops.attention(q, keys, values, 0.25)


WRITTEN = {"rope_cache_": 1, "attention": 1}
NOT_WRITTEN = {"rope": 1, "copy_": 2, "attention": 1}
NOT_JOINED = {"rope": 1, "rope_cache_": 1, "copy_": 1, "attention": 1}
ROTATIONS: dict[Callable | str, dict[str, int]] = {
    norms_of_heads: WRITTEN,
    norms_behind_transpositions: WRITTEN,
    one_by_one: WRITTEN,
    values_first: WRITTEN,
    queries_scaled_before_the_write: WRITTEN | {"mul": 1},
    values_made_last: WRITTEN | {"mul": 1},
    keys_given_as_queries: WRITTEN,
    ends_of_heads: WRITTEN,
    begins_of_normed_heads: WRITTEN,
    not_turned: WRITTEN,
    "seen(*map(swapped, (q, k, v)), keys, values)": WRITTEN,
    not_turned_and_of_one_memory: {"copy_": 2, "attention": 1},
    not_turned_and_made_late: {"copy_": 2, "attention": 1, "mul": 1},
    not_turned_and_written_twice: {"copy_": 3, "attention": 1},
    changed_behind_the_write: {"copy_": 2, "attention": 1, "clone": 1, "mul_": 1},
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
    three_rotations: WRITTEN | {"rope": 1},
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
    "(turned(q), turned(k.half()))": {"rope": 2, "_to_copy": 1},
    "seen(*turned(q, k), swapped(v[:, :, :1]), keys, values)": NOT_WRITTEN,
    "seen(*turned(q, k), swapped(v).double(), keys, values)": NOT_WRITTEN | {"_to_copy": 1},
    written_by_index: {"rope": 1, "arange": 1, "index_copy_": 2, "attention": 1},
}


def of_a_cache() -> tuple[Tensor, Tensor, Tensor]:
    shape = (BATCH, 2, BEFORE + TOKENS + 2, WIDE)
    return random(BATCH, TOKENS, 8 * WIDE), random(*shape), random(*shape, seed=1)


def behind_a_projection(case: Callable | str) -> Callable:
    function = function_of(case, "q, k, v, keys, values")
    return lambda x, keys, values: function(*of_heads(x), keys, values)


@pytest.mark.parametrize("case", ROTATIONS, ids=name_of)
def test_rotations_and_the_write_into_a_cache(case):
    assert_left(ROTATIONS[case], behind_a_projection(case), *of_a_cache())


def test_a_rotation_and_a_norm_side_by_side_in_a_cache():
    assert_left({"rope_cache_": 1, "mul": 1}, latents, *of_a_cache())


def pool(of):
    return turned(of, q_norm_weight=NORM[:WIDE], norm_eps=1e-5, norm_weight_offset=1.0)


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


ALONE = {"rope": 1, "copy_": 1}
POOLS: dict[Callable | str, dict[str, int]] = {
    pool_written: {"rope_cache_": 1, "sum": 1},
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


def of_elements(dtype):
    return random(1, 1, 64).to(dtype), random(1, 4, 16).to(dtype), torch.tensor([[7]])


# Functions of these three.
def chain(x, y, p):
    return torch.sigmoid(x.half()) * x + 0.5


def chain_with_weights(x, y, p):
    """Values that are read twice, and smaller ones, which are computed for each element."""
    gate = torch.sigmoid(NORM / 0.3)
    return torch.sqrt((torch.sigmoid(-NORM) * (1 + gate)).clamp(min=1e-3)) * x + gate * torch.tanh(x)


def chain_through_views(x, y, p):
    scale = torch.log(p.float() + 1).half().unsqueeze(1) * SCALES[:4].view(1, 4, 1) + 1
    return y * scale.view(1, 4, 1) - torch.exp(-y).square()


def chain_in_two_shapes(x, y, p):
    rows = torch.sigmoid(x).view(1, 4, 16) * y
    return torch.exp(rows * SCALES[:4].view(1, 4, 1)).view(1, 1, 64) + x * SCALES[:1]


def chain_with_one_more_dimension(x, y, p):
    more = (torch.sigmoid(x) * 2).unsqueeze(1) + 1
    return torch.cat((more, x.unsqueeze(1)), -1)


def two_chains(x, y, p):
    mean = (x.float() * 2 + 1).square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + 1) * torch.relu(x)


def chain_of_two_results(x, y, p):
    both = torch.nn.functional.silu(x) * 2
    return both, both.half() + 1


def chain_in_another_order(x, y, p):
    """Its result would have other strides than the model's."""
    return torch.log1p(softplus(y).mT) / torch.maximum(y.mT, p.float())


def other_means_of_a_chain(x, y, p):
    rows = torch.sigmoid(y) * y
    return rows.mean(-1), torch.exp(rows + 1).mean(-2, keepdim=True), (rows * 2).mean(-2)


def chain_that_is_expanded(x, y, p):
    """As repeat_interleave does: what is copied has more elements than the chain before it."""
    return (x * 2).unsqueeze(-1).expand(*x.shape, 2).clone()


def chain_whose_input_changes(x, y, p):
    x = x.clone()
    twice, row = x * 2, x.view(-1)
    row[:3].mul_(2)
    return torch.sigmoid(twice) + 1, x


def chain_whose_value_changes(x, y, p):
    twice = x * 2
    twice.view(-1)[:3].mul_(2)
    return torch.sigmoid(twice)


def long_chain(x, y, p):
    for number in range(40):
        x = torch.sigmoid(x) * (2 + number % 5)
    return x


def chain_of_many_inputs(x, y, p):
    for weight in (NORM, OTHER_NORM, NORM[:1], NORM[1:2], NORM[2:3], NORM[3:4], NORM[4:5], NORM[5:6]):
        x = x * weight + 1
    return x


def chain_of_many_numbers(x, y, p):
    for number in range(20):
        x = x + number / 7
    return x


@pytest.mark.parametrize(
    ("case", "left"),
    [
        (chain, {"_pointwise": 1}),
        (chain_with_weights, {"_pointwise": 1}),
        (chain_through_views, {"_pointwise": 1}),
        (chain_in_two_shapes, {"_pointwise": 1}),
        (chain_with_one_more_dimension, {"_pointwise": 1, "cat": 1}),
        ("(torch.sigmoid(y) * y).mean(-2)", {"_pointwise": 1}),
        (other_means_of_a_chain, {"_pointwise": 2, "mean": 3, "mul": 1}),
        ("torch.exp((torch.sigmoid(y) * 2).view(1, 16, 4)) + 1", {"_pointwise": 2}),
        ("torch.sigmoid((torch.sigmoid(x.float()) * 2).view(torch.int32).float())", {"_pointwise": 2}),
        (two_chains, {"_pointwise": 2, "mean": 1}),
        (chain_of_two_results, {"_pointwise": 2}),
        (chain_in_another_order, {"softplus": 1, "log1p": 1, "_to_copy": 1, "maximum": 1, "div": 1}),
        ("x * 2", {"mul": 1}),
        ("(p + 1) * 2", {"add": 1, "mul": 1}),
        (chain_that_is_expanded, {"mul": 1, "clone": 1}),
        ("x.double() * 2 + 1", {"_to_copy": 1, "mul": 1, "add": 1}),
        ("torch.add(x * 3, x, alpha=2)", {"mul": 1, "add": 1}),
        ("softplus(x * 9, 1, 2) * 3", {"mul": 2, "softplus": 1}),
        (chain_whose_input_changes, {"clone": 1, "mul": 1, "mul_": 1, "_pointwise": 1}),
        (chain_whose_value_changes, {"mul": 1, "mul_": 1, "sigmoid": 1}),
        (long_chain, {"_pointwise": 3}),
        (chain_of_many_inputs, {"_pointwise": 2}),
        (chain_of_many_numbers, {"_pointwise": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chains_of_elements(case, left, dtype):
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    function = function_of(case, "x, y, p")
    assert_left(left, function, *of_elements(dtype), strides=True, tolerance=tolerance)


def test_what_is_written_for_nobody():
    """Its memory is read by nothing; one that is, through any view, is written."""

    def dead(x):
        mask = torch.zeros_like(x)
        mask.scatter_(1, torch.topk(x, 1)[1], 1)
        mask.view(-1)[:2].copy_(x.view(-1)[:2])
        return x * 2

    def read(x):
        mask = torch.zeros_like(x)
        row = mask.view(-1)
        mask.scatter_(1, torch.topk(x, 1)[1], 1)
        return x + row

    def copied(x):
        mask, other = torch.zeros_like(x), x.clone()
        mask.fill_(1)
        other.copy_(mask)
        return other

    x = random(1, 8)
    assert_left({"mul": 1}, dead, x)
    assert_left({"zeros_like": 1, "topk": 1, "scatter_": 1, "add": 1}, read, x)
    graph = recorded(copied, x)
    simplify(graph)
    assert_computes(graph, copied, x)


@pytest.mark.parametrize("parts", [torch.split, torch.unsafe_split])
def test_what_is_written_into_a_part(parts):
    """The schema of one of them says that parts are new tensors: they are none."""

    def written(x):
        x = x.clone()
        twice = x * 2
        first, _ = parts(x, 4, 1)
        first.mul_(3)
        return x * 2 + twice

    def read(x):
        x = x.clone()
        first, _ = parts(x, 4, 1)
        x.mul_(3)
        return first + 1

    for function in (written, read):
        graph = recorded(function, random(1, 8))
        simplify(graph)
        assert_computes(graph, function, random(1, 8))


@pytest.mark.parametrize("left_out", FUNCTIONS, ids=lambda left_out: left_out.__name__)
def test_each_pass_is_needed(monkeypatch, left_out):
    """Without it, a pattern above is not found."""
    monkeypatch.setattr(passes, "PASSES", tuple(each for each in PASSES if each is not left_out))
    token = random(1, 1, H), random(1, 1, H, seed=1)
    state = random(1, HEADS, WIDTH, WIDTH)
    cases = [(function_of(case), token, left) for case, left in CASES.items()]
    cases += [(behind_a_projection(each), of_a_cache(), left) for each, left in ROTATIONS.items()]
    cases.append((chain, of_elements(torch.float32), {"_pointwise": 1}))
    cases.append((chain_in_two_shapes, of_elements(torch.float32), {"_pointwise": 1}))
    cases.append((gated_delta_rule, (*token, state), {"mul": 4, "gated_delta_rule_": 1}))
    for function, inputs, left in cases:
        graph = recorded(function, *inputs)
        simplify(graph)
        try:
            graph.lint()
        except RuntimeError:  # something is read before it is there
            return
        if operators(graph) != left:
            return
    pytest.fail("all patterns are found without it")
