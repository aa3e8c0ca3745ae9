"""How many bytes kernels move: every access counts, cached or not."""

import itertools
from functools import partial

import pytest
import torch
from simulator import DispatchCounters
from support import on_mps
from support.expert_layers import random_ids
from support.gguf_blocks import random_blocks
from support.on_mps import warnings_of_operators
from support.oracles_experts import numbers_of
from support.quantized_layers import GGUF_FORMATS, place, random_matrix, random_quantized
from support.sweep import in_sweep, rows_in_sweep
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.quantization import Format
from torch_moe_mps.quantization.formats import ErrorSums, quantize_stack

ops = torch.ops.moe_mps
EPS = 1e-6
# What other tests compile, too.
DTYPE, INT4 = torch.bfloat16, "affine4_32"
DTYPES = (torch.float32, DTYPE)
FORMATS = {"dense": None, "int4": INT4, "int8": "affine8_64", "mxfp4": "mxfp4"}
OTHER_GROUPS = {name: f"affine{name}" for name in ("4_64", "4_128", "8_32", "8_128")}
PAIRS_AT_ONCE, LANES_OF_A_SCALE = 2, 4
TILE_PAIRS, TILE_ROWS = 32, 128  # TILE_ROWS: of a weight


def tensor(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return on_mps.tensor(*shape, dtype=dtype)


def matrix(rows: int, columns: int, form: str = INT4) -> list:
    return place(random_matrix(rows, columns, form, DTYPE, 0), "mps")


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def only_dispatch(simulated, call) -> DispatchCounters:
    with simulated.counters() as dispatches:
        call()
    (dispatch,) = dispatches
    return dispatch


def moved(simulated, call) -> int:
    """Bytes read and written, without the parameters, which are bound last."""
    buffers = only_dispatch(simulated, call).buffers
    *tensors, _parameters = sorted(buffers)
    return sum(buffers[i].bytes_read + buffers[i].bytes_written for i in tensors)


# Each operand moves once, norm weights once for each row.


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    rows_in_sweep(
        ((*size, dtype) for dtype in DTYPES for size in ((1, 2048), (3, 4096), (300, 512), (2, 8192))),
        [(3, 4096, torch.bfloat16), (300, 512, torch.bfloat16)],
    ),
)
def test_norms(simulated, rows, width, dtype):
    residual, x, w = tensor(rows, width, dtype=dtype), tensor(rows, width, dtype=dtype), tensor(width)
    row, weight = nbytes(x), rows * nbytes(w)
    for operands, operator, arguments in (
        (2, ops.rms_norm, (x, w)),
        (3, ops.fused_norm_add, (residual, x, w)),
        (4, ops.fused_residual_norm, (residual, x, w)),
    ):
        read = moved(simulated, lambda: operator(*arguments, norm_eps=EPS))  # noqa: B023
        assert read <= 1.05 * (operands * row + weight)


@pytest.mark.parametrize(
    ("rows", "slots", "width", "dtype"),
    rows_in_sweep(
        ((*size, dtype) for dtype in DTYPES for size in ((1, 8, 2048), (5, 4, 1024), (2, 40, 512))),
        [(5, 4, 1024, torch.bfloat16), (2, 40, 512, torch.bfloat16)],
    ),
)
def test_weighted_sums(simulated, rows, slots, width, dtype):
    x, residual = tensor(rows, slots, width, dtype=dtype), tensor(rows, width, dtype=dtype)
    weights, norm = tensor(rows, slots, dtype=torch.float32), tensor(width)
    must, row = nbytes(x, weights), nbytes(residual)
    arguments = (residual, x, weights)
    assert moved(simulated, lambda: ops.weighted_sum_stacked(x, weights)) <= 1.05 * (must + row)
    added = moved(simulated, lambda: ops.weighted_sum_residual_stacked_(*arguments))
    reduced = moved(simulated, lambda: ops.moe_weighted_reduce(x, weights, residual=residual))
    assert max(added, reduced) <= 1.05 * (must + 2 * row)
    normed = moved(simulated, lambda: ops.weighted_sum_residual_norm_stacked_(*arguments, norm, norm_eps=EPS))
    assert normed <= 1.05 * (must + 3 * row + rows * nbytes(norm))


def test_silu_mul(simulated):
    gate, up = tensor(7, 300), tensor(7, 300)
    assert moved(simulated, lambda: ops.silu_mul_stacked(gate, up)) == nbytes(gate, up, gate)


@pytest.mark.parametrize("num_experts", in_sweep([8, 60, 128, 512], [60, 512]))
def test_router_reads_its_logits_once(simulated, num_experts):
    logits = tensor(5, num_experts)
    dispatch = only_dispatch(simulated, lambda: ops.moe_router_topk_softmax(logits, 4, norm_topk_prob=True))
    *tensors, _parameters = sorted(dispatch.buffers)
    assert sum(dispatch.buffers[i].bytes_read for i in tensors) == nbytes(logits)


def test_gate_reads_the_router_once_for_four_tokens(simulated):
    hidden, router = tensor(1024, 128), tensor(16, 128)
    with simulated.counters() as dispatches:
        ops.moe_gate(hidden, router, tensor(128), tensor(16), 4, norm_eps=EPS, renormalize_after_scale=True)
    assert len(dispatches) == 2
    assert dispatches[0].buffers[1].bytes_read == 1024 // 4 * nbytes(router)


def test_delta_moves_its_state_once(simulated):
    q, v, gate = tensor(1, 4, 2, 128), tensor(1, 4, 4, 128), tensor(1, 4, 4)
    state = tensor(1, 4, 128, 128, dtype=torch.float32)
    run = partial(ops.gated_delta_rule_, q, q, v, gate, state, scale=0.1, beta=gate)
    dispatch = only_dispatch(simulated, run)
    assert dispatch.buffers[8].bytes_read == dispatch.buffers[8].bytes_written == nbytes(state)


class Copied(TorchDispatchMode):
    """Counts the bytes of what operators of torch read and write, but for ours."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            tensors = {id(x): x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
            self.bytes += nbytes(*tensors.values())
        return out


@pytest.mark.parametrize("format, of_results", [("affine4_64", 0.5625)])
def test_quantising_by_importance_moves_each_weight_once(simulated, format, of_results):
    """For weights on the CPU. Copies, two of the scales, and what the report sums are counted, too."""
    weight, importance = torch.randn(1, 256, 1024).bfloat16(), torch.rand(1, 1024)
    with simulated.counters() as dispatches, Copied() as copied:
        quantize_stack(weight, Format(*numbers_of(format)), ErrorSums(), importance)
    (dispatch,), n = dispatches, weight.numel()
    *tensors, _parameters = (dispatch.buffers[i] for i in sorted(dispatch.buffers))
    assert tensors[0].bytes_read == 2 * n and tensors[1].distinct_bytes_read == nbytes(importance)
    sums = 8 / numbers_of(format)[1]
    assert sum(buffer.bytes_written for buffer in tensors) == (of_results + sums) * n
    own = sum(buffer.distinct_bytes_read + buffer.bytes_written for buffer in tensors)
    of_scales = of_results - numbers_of(format)[0] / 8
    assert own + copied.bytes <= 1.02 * (3 * 2 + 3 * of_results + 2 * of_scales + 2 * sums) * n


# Experts -----------------------------------------------------------------------------------------------


class Layer:
    """The weights of E experts in one format, on the device."""

    def __init__(self, experts: int, hidden: int, intermediate: int, format: str):
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.format = (FORMATS | OTHER_GROUPS)[format]
        sizes = ((2 * intermediate, hidden), (hidden, intermediate))
        self.gate_up, self.down = (
            place(random_quantized(experts, *size, self.format, DTYPE, 0), "mps")
            if self.format
            else [tensor(experts, *size) * size[1] ** -0.5]
            for size in sizes
        )

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        x, routing = tensor(len(ids), self.hidden), torch.rand(ids.shape).to("mps")
        operator = ops._moe_experts_quantized if self.format else ops._moe_experts
        options = {"format": self.format} if self.format else {}
        return operator(x, routing, ids.to("mps"), *self.gate_up, *self.down, **options)

    def check_read(self, dispatch, parts: list[torch.Tensor], experts: int, times: int) -> None:
        """Every byte of the matrices of `experts` experts is read, and at most `times` experts' bytes in all.

        Lanes that share a scale load it in one instruction; the counters book it for each of them.
        """
        sizes = [nbytes(part) // self.experts for part in parts if part is not None]
        read = [dispatch.buffers[index] for index in (1, 2, 3) if index in dispatch.buffers]
        assert sum(buffer.distinct_bytes_read for buffer in read) == experts * sum(sizes)
        assert weight_bytes(dispatch) <= 1.05 * times * (sizes[0] + LANES_OF_A_SCALE * sum(sizes[1:]))


def weight_bytes(dispatch) -> int:
    """The bytes bound at 1, 2 and 3: the matrix, its scales and biases, or the matrix again."""
    return sum(dispatch.buffers[index].bytes_read for index in (1, 2, 3) if index in dispatch.buffers)


def ids_of(tokens: int, slots: int, experts: int) -> torch.Tensor:
    return random_ids(tokens, slots, experts, tokens, torch.int32)


SHAPES = ((16, 192, 1), (16, 192, 4), (16, 192, 8), (16, 192, 31), (5, 192, 4), (5, 192, 9))


OF_GROUPS = [*itertools.product(OTHER_GROUPS, [(8, 384, 6), (8, 384, 11)])]


@pytest.mark.parametrize(
    "format, shape",
    [
        *rows_in_sweep(
            itertools.product(FORMATS, SHAPES), [("dense", SHAPES[2]), *(("int4", s) for s in SHAPES)]
        ),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in OF_GROUPS),
    ],
)
def test_decode_reads_each_expert_once(simulated, format, shape):
    """From memory: a threadgroup goes through its rows again for every two pairs."""
    experts, hidden, tokens = shape
    layer = Layer(experts, hidden, 128, format)
    for ids in (ids_of(tokens, 3, experts), ids_of(1, 3, experts).expand(tokens, 3)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert len(dispatches) == 2
        readings = int(((ids.flatten().bincount() + PAIRS_AT_ONCE - 1) // PAIRS_AT_ONCE).sum())
        for dispatch, parts in zip(dispatches, (layer.gate_up, layer.down), strict=True):
            layer.check_read(dispatch, parts, len(ids.unique()), readings)


@pytest.mark.parametrize(
    ("format", "tokens"), rows_in_sweep(itertools.product(FORMATS, (12, 70)), [("dense", 12), ("int4", 70)])
)
def test_prefill_reads_a_weight_tile_once_per_tile_of_pairs(simulated, format, tokens):
    """And launches as many threadgroups as there are tiles, even when all tokens choose one expert.

    Matrix products begin with six pairs an expert.
    """
    layer = Layer(4, 128, 128, format)
    for ids in (ids_of(tokens, 2, 4), torch.full((tokens, 2), 2, dtype=torch.int32)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert all(dispatch.kernel.startswith("gemm32_") for dispatch in dispatches[1:3])
        tiles = int((ids.flatten().bincount(minlength=4) / TILE_PAIRS).ceil().sum())
        rows = (2 * layer.intermediate, layer.hidden)
        for dispatch, parts, count in zip(dispatches[1:3], (layer.gate_up, layer.down), rows, strict=True):
            assert dispatch.threadgroups == tiles * -(-count // TILE_ROWS)
            layer.check_read(dispatch, parts, len(ids.unique()), tiles)


def test_prefill_of_sentinels_alone(simulated):
    """No tile: the grids are not empty, nothing is read, and the result is zero."""
    layer = Layer(4, 128, 64, "int4")
    with simulated.counters() as dispatches:
        out = layer(torch.full((40, 2), -1, dtype=torch.int32))
    assert not out.cpu().any()
    for dispatch in dispatches[1:3]:
        assert weight_bytes(dispatch) == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_is_bound_where_it_lies(simulated, transposed):
    """The inputs of a row side by side in memory. A copy would not begin behind another expert."""
    stack = tensor(9, 64, 96)[1:]
    weight = stack.mT if transposed else stack
    with simulated.trace() as commands:
        ops.expert_mm(tensor(1, 96), torch.tensor([[5]], device="mps"), weight, None, transposed=transposed)
    (command,) = commands
    assert command.startswith("matmul_rows_bf16 ")
    assert f" 1=B[{64 * 96 * 2}:{9 * 64 * 96 * 2}] " in command


def test_other_strides_are_copied_with_a_warning(simulated, capfd):
    stack = tensor(8, 128, 96)[:, :64]
    x, ids = tensor(1, 96), torch.tensor([[5]], device="mps")
    with warnings_of_operators(capfd) as said, simulated.trace() as commands:
        ops.expert_mm(x, ids, stack)
    assert f" 1=B[0:{8 * 64 * 96 * 2}] " in commands[0]
    assert "a stack of experts of shape [8, 64, 96]" in said()


# Linear layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_weights_are_read_once(simulated, tokens):
    """By one token, by two that share dot products, and by a tile of a matrix product."""
    parts, x = matrix(512, 1024), tensor(tokens, 1024)
    dispatch = only_dispatch(simulated, lambda: ops.linear_quantized(x, *parts, format=INT4))
    packed = dispatch.buffers[1]
    assert packed.bytes_read == packed.distinct_bytes_read == parts[0].nbytes


@pytest.mark.parametrize("form", in_sweep(GGUF_FORMATS, ["q2_k"]))
def test_ggml_types_are_read_once(simulated, form):
    """As many bytes of memory as the file has, by the kernels of the plan, which asks for no format."""
    parts = matrix(128, 512, form)
    for tokens in (1, 2, 8, 16):
        x = tensor(tokens, 512)
        dispatch = only_dispatch(simulated, partial(ops.linear_quantized, x, *parts, format=form))
        planned = torch.ops.moe_mps._plan_linear(tokens, 128, inputs=512).partition(" ")[0]
        assert dispatch.kernel == f"{planned}_{form}_bf16"
        assert dispatch.buffers[1].bytes_read == nbytes(parts[0])
        read = [dispatch.buffers[i] for i in (1, 2, 3) if i in dispatch.buffers]  # a tensor is there once
        of_blocks = 128 * len(random_blocks(form, (512,)))
        assert sum(buffer.distinct_bytes_read for buffer in read) == of_blocks


def test_an_embedding_reads_its_rows_alone(simulated):
    parts, ids = matrix(50, 256), torch.tensor([7, 3, -1], device="mps")
    rows = only_dispatch(
        simulated, lambda: ops.embedding_quantized(ids, *parts, format=INT4, dtype=dtype_name(DTYPE))
    )
    assert rows.buffers[0].bytes_read == 2 * parts[0].nbytes // 50
