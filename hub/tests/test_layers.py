import moe_mps
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm(dtype):
    norm = moe_mps.layers.RMSNorm()
    norm.weight, norm.variance_epsilon = torch.randn(64, device="mps", dtype=dtype), 1e-6
    x = torch.randn(3, 64, device="mps", dtype=dtype)
    expected = torch.nn.functional.rms_norm(x, (64,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.kernels_ci
def test_router():
    logits = torch.randn(5, 16, device="mps")
    weights, ids = moe_mps.moe_router_topk_softmax(logits, 4, norm_topk_prob=True)
    expected, order = logits.softmax(-1).topk(4)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))
    assert torch.equal(ids.long(), order)
