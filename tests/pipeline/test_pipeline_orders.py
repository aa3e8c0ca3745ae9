"""Orders of the first process, and messages between processes."""

import typing

import pytest
import torch
import torch.distributed as dist

from torch_moe_mps.pipeline import orders
from torch_moe_mps.pipeline.follower import HANDLERS
from torch_moe_mps.pipeline.peers import Peers, Timeouts


def test_each_order_has_a_handler_of_its_type():
    assert HANDLERS.keys() | {orders.End} == {*orders.CacheOrder.kinds.values()}
    for kind, handler in HANDLERS.items():
        assert typing.get_type_hints(handler) == {"order": kind, "return": type(None)}


def test_orders_arrive_as_they_were_sent():
    """Tensors travel behind the text, also those in a dictionary."""
    ids, pixels = torch.arange(3)[None], torch.rand(2, 2)
    sent = [
        orders.StartPrefill({"input_ids": ids, "pixel_values": pixels}, 3, [1, 3], None, 0, True),
        orders.Keep(3, 2, [7, 8], False, []),
        orders.Step(ids[0]),
        orders.HoldStates(),
        orders.End(),
    ]
    message = orders.encode(sent)
    assert len(message) == 4
    begin, keep, step, hold, end = orders.decode(message)
    assert begin.inputs.keys() == {"input_ids", "pixel_values"} and begin.inputs["pixel_values"] is pixels
    assert (begin.number, begin.known, begin.held, begin.cached, begin.reads_whole) == (
        3,
        [1, 3],
        None,
        0,
        True,
    )
    assert keep == sent[1] and step.ids is message[3] and (hold, end) == (sent[3], sent[4])


def test_a_layer_that_returns_too_many_tensors():
    """The error names the limit, what came, and what to do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        peers, layer = Peers(Timeouts()), [torch.ones(1, 2, 3)] * 40
        expected = (
            r"moe_mps::pipeline: hidden states must be tensors that 512 bytes describe, got 40 tensors in "
            r"\d+ bytes: run this model in one process"
        )
        with pytest.raises(ValueError, match=expected):
            peers.send(0, "hidden states", "", layer)
    finally:
        dist.destroy_process_group()
