"""Results in a recording are like those of the operator, whichever calls were recorded before."""

import functools
import operator

import pytest
import torch
from torch import Tensor

from torch_moe_mps.models.graphs import fakes
from torch_moe_mps.models.graphs.tracing import Recorder, key_of

ops = torch.ops.aten
X, Y, ROWS = torch.randn(2, 5, 6), torch.randn(6), torch.randn(4, 6)
LAST, SLICED = torch.randn(2, 5, 1), torch.randn(2, 7, 12)[:, 1:6, 3:9]
CALLS = {
    ops.mul.Tensor: [(X, Y), (Y, X), (X.mT, 2), (X.half(), Y.bfloat16()), (torch.arange(6), 0.5)],
    ops.slice.Tensor: [(X, 2, 1, 5), (X, 1, 0, 9223372036854775807, 2), (SLICED, -1, -3)],
    ops.topk.default: [(X, 3), (ROWS, 2, 0)],
    ops.sum.dim_IntList: [(X, [1]), (torch.arange(6), [0], True), (X > 0, [-1])],
    ops._to_copy.default: [(X,), (X.mT,)],
}
OPTIONS = {ops._to_copy.default: {"dtype": torch.float16}, ops.sum.dim_IntList: {"dtype": torch.float64}}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(fakes, "_known", fakes.Bounded(1000))


def results_of(call, args, options, recorder=None) -> list[Tensor]:
    """Results of an operator for fake tensors like these."""
    recorder = recorder or Recorder()

    def faked(value):
        if isinstance(value, list):
            return [*map(faked, value)]
        return recorder.input(value, (*value.shape,)) if isinstance(value, Tensor) else value

    made = [*map(faked, args)]
    with torch.no_grad():
        result = recorder.run(lambda: call(*made, **options))
    return [*result] if isinstance(result, (tuple, list)) else [result]


def described(tensor: Tensor) -> tuple:
    """Strides of dimensions of one element lead nowhere."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_results_are_those_of_the_operator(call):
    options = [{}, OPTIONS[call]] if call in OPTIONS else [{}]
    for args in CALLS[call]:
        for named in options:
            result = call(*args, **named)
            expected = [*result] if isinstance(result, (tuple, list)) else [result]
            for _ in range(2):  # the second one is known
                assert [*map(described, results_of(call, args, named))] == [*map(described, expected)]


@pytest.mark.parametrize("args", [(X, torch.randn(5)), (X, torch.randn(6, device="meta")), (ROWS, None)])
def test_wrong_arguments_raise(args):
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError)):
            results_of(ops.mul.Tensor, args, {})


def test_other_dtypes_and_devices_are_other_calls():
    kinds = [(dtype, device) for dtype in (torch.float32, torch.bfloat16) for device in ("cpu", "meta")]
    for dtype, device in kinds * 2:
        like = torch.empty(3, 4, dtype=dtype, device=device)
        (result,) = results_of(ops.mul.Tensor, (like, 2.0), {})
        assert (result.dtype, result.device.type) == (dtype, device)


def test_numbers_of_other_types_are_other_calls():
    whole = torch.arange(4)
    for number, dtype in ((2, torch.int64), (2.0, torch.float32), (True, torch.int64)) * 2:
        (result,) = results_of(ops.mul.Tensor, (whole, number), {})
        assert result.dtype == dtype


def test_other_strides_are_other_calls():
    for x in (ROWS, torch.randn(6, 4).mT, SLICED[0, :4]) * 2:
        for call in (ops.neg.default, ops.detach.default):
            (result,) = results_of(call, (x,), {})
            assert described(result) == described(call(x))


def test_a_known_result_with_symbols_is_like_the_first():
    """Nothing is asked of its sizes, which would be a condition of the recording."""
    recorder = Recorder()
    count, begin = recorder.symbol(5, 2), recorder.symbol(3, 0)
    x = recorder.input(X, (2, count, 6))
    made, conditions = [], []
    for _ in range(3):
        with torch.no_grad():
            made.append(recorder.run(lambda: x.transpose(1, 2).narrow(1, begin, 2)))
        conditions.append(len(recorder.env.guards))
    assert len({*map(id, made)}) == 3 and len({*conditions}) == 1
    assert key_of(made[0]) == key_of(made[1]) == key_of(made[2])
    assert key_of(made[1])[2:] == key_of(((2, 2, count), (6 * count, 1, 6), begin))


@pytest.mark.parametrize("first", ["fixed", "symbol"])
def test_symbols_stay_in_their_recording(first):
    """A size that differs from call to call has its value now in common with a fixed one, and no result."""

    def recorded(is_symbol: bool) -> None:
        recorder = Recorder()
        count = recorder.symbol(5, 2)
        x = recorder.input(X, (2, count if is_symbol else 5, 6))
        with torch.no_grad():
            results = [recorder.run(lambda: x * 2.0), recorder.run(lambda: x.transpose(1, 2))]
        for result, place in zip(results, (1, 2), strict=True):
            size = result.shape[place]
            assert isinstance(size, torch.SymInt) == is_symbol
            assert not is_symbol or (
                size.node.shape_env is recorder.env and size.node.expr == count.node.expr
            )

    for is_symbol in (first == "symbol", first != "symbol") * 2:
        recorded(is_symbol)


def test_a_symbol_in_an_argument_stays_in_its_recording():
    for _ in range(2):
        recorder = Recorder()
        count = recorder.symbol(3, 2)
        x = recorder.input(X, (2, 5, 6))
        with torch.no_grad():
            result = recorder.run(functools.partial(operator.getitem, x, (..., slice(count))))
        assert result.shape[2].node.shape_env is recorder.env


def test_layers_share_results_over_recordings_with_symbols():
    """A token's hidden states have no symbols, though the length of its cache is one."""
    for _ in range(2):
        recorder = Recorder()
        recorder.symbol(7, 2)
        results_of(ops.mul.Tensor, (X, Y), {}, recorder)
    assert sum(ops.mul.Tensor in key for key in fakes._known) == 1
