"""scripts/bench/bench_lookahead.py: counts by hand, and routers whose choices are known."""

import bench_lookahead
import numpy as np
import torch
from support.models import tiny


def test_shares():
    """Two experts a token, four texts that do not count, and slots for two."""
    warm = [[[0, 1]]] * bench_lookahead.WARM
    chosen = torch.tensor([*warm, [[0, 2]], [[3, 2]]])  # misses 2, then 3
    named = torch.tensor([*warm, [[2, 3]], [[0, 5]]])  # finds 2 and reads 3 in vain; finds none, reads 5
    hits, found, of_missing, in_vain = bench_lookahead.shares([chosen], [named], slots=2)
    assert (hits, found, of_missing, in_vain) == (0.5, 0.25, 0.5, 1.0)


@torch.no_grad()
def test_routed():
    """A router with the weights of the one before names what that one chooses; others do not."""
    model = tiny("qwen3_moe", num_hidden_layers=3, num_experts=8)
    first, second, _ = (layer.mlp.gate for layer in model.model.layers)
    second.weight.copy_(first.weight)
    ids = torch.arange(2, 32).view(2, 15)
    inputs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    chosen, named = bench_lookahead.routed(model, ids)
    k = model.config.num_experts_per_tok
    assert len(chosen) == len(named) == 2 and chosen[0].shape == named[1].shape == (2, 15, k)
    assert torch.equal(named[0], (inputs[0] @ first.weight.T).topk(k).indices)
    assert not torch.equal(named[1], chosen[1])


def test_the_table(tmp_path, monkeypatch, capsys):
    tiny("qwen3_moe", num_experts=8).save_pretrained(tmp_path / "model")
    count = bench_lookahead.TEXTS * bench_lookahead.LENGTH
    np.random.default_rng(0).integers(2, 90, count).astype(np.uint16).tofile(tmp_path / "held.bin")
    monkeypatch.setattr("sys.argv", ["bench", str(tmp_path / "model"), str(tmp_path / "held.bin")])
    bench_lookahead.main()
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("slots | hits") and [int(row.split()[0]) for row in rows] == [3, 4, 5]
    hits = [float(row.split(" | ")[1]) for row in rows]
    assert hits == sorted(hits) and hits[-1] < 1
