"""Random numbers of a block: by its seed inside, and outside as if it had not been."""

import pytest
import torch

from torch_moe_mps.transformers.basics.scoped import Seeded


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_numbers_of_a_block(name, simulated):
    device = torch.device(name)

    def drawn() -> list[float]:
        return [*torch.rand(2).tolist(), *torch.rand(2, device=device).cpu().tolist()]

    torch.manual_seed(3)
    within = [drawn(), drawn()]
    torch.manual_seed(5)
    without = [drawn(), drawn(), drawn()]
    torch.manual_seed(5)
    found = [drawn()]
    with Seeded(device, 3) as numbers:
        assert drawn() == within[0]
        with numbers.outside():
            found.append(drawn())
        assert drawn() == within[1]
    assert [*found, drawn()] == without
    torch.manual_seed(5)
    with pytest.raises(KeyError), Seeded(device, None) as numbers, numbers.outside():
        assert drawn() == without[0]
        raise KeyError
    assert drawn() == without[1]
