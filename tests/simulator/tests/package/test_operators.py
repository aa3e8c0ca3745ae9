"""The package's operators on the simulated device: threads, and what they leave behind."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytestmark = pytest.mark.usefixtures("simulated")


def test_threads_call_operators_of_the_package():
    """New signatures go through Python's checks, errors included, while other threads encode and wait."""

    def work(i):
        right = 0
        for step in range(40):
            size = 8 * (step % 5) + i + 1
            x, weight = torch.randn(3, size), torch.ones(size)
            expected = torch.ops.moe_mps.fused_norm_add(x, x, weight, norm_eps=1e-6)
            on_mps = [tensor.to("mps") for tensor in (x, x, weight)]
            right += torch.allclose(
                torch.ops.moe_mps.fused_norm_add(*on_mps, norm_eps=1e-6).cpu(), expected, atol=1e-5
            )
            with pytest.raises(ValueError, match="moe_mps::fused_norm_add: norm_weight must be"):
                torch.ops.moe_mps.fused_norm_add(
                    *on_mps[:2], torch.ones(size + 1, device="mps"), norm_eps=1e-6
                )
        return right

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [40, 40, 40]


def test_operators_of_the_package_leak_nothing(simulated):
    x, weight = torch.randn(3, 40, device="mps"), torch.ones(40, device="mps")

    def call():
        torch.ops.moe_mps.fused_residual_norm(x, x, weight, norm_eps=1e-6)
        torch.ops.moe_mps.moe_router_topk_softmax(x, 4, norm_topk_prob=True)
        with pytest.raises(ValueError, match="weight must be"):
            torch.ops.moe_mps.fused_norm_add(x, x, x[0, :3], norm_eps=1e-6)
        torch.mps.synchronize()

    call()
    gc.collect()
    objects, buffers = simulated.live_objects(), simulated.live_buffers()
    for _ in range(3):
        call()
    gc.collect()
    assert (simulated.live_objects(), simulated.live_buffers()) == (objects, buffers)
