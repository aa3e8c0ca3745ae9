"""scripts/bench/bench_gguf.py: its file has what is computed, and the processes load it as it says."""

import bench_gguf
import pytest
from gguf import GGUFReader


def test_bytes_of_experts(tmp_path):
    bench_gguf.write_random(path := tmp_path / "model.gguf", layers=1, experts=8)
    tensors = [tensor for tensor in GGUFReader(path).tensors if "_exps" in tensor.name]
    assert len(tensors) == 3 and {tensor.tensor_type.name for tensor in tensors} == {"Q4_K"}
    assert bench_gguf.bytes_of_experts(1, 8) == sum(int(tensor.n_bytes) for tensor in tensors)


@pytest.mark.slow("loads two models")
def test_loaded(tmp_path):
    bench_gguf.write_random(path := tmp_path / "model.gguf", layers=8, experts=8)
    size = bench_gguf.bytes_of_experts(8, 8)
    whole, part = (bench_gguf.loaded(path, memory) for memory in (None, size * 7 // 8))
    assert (whole["on_disk"], part["on_disk"]) == (False, True)
    assert whole["peak"] > size > part["peak"]  # no token has filled the room
    assert [*tmp_path.iterdir()] == [path]


def test_the_table():
    results = [{"seconds": 11.12, "peak": 2150000000}, {"seconds": 2.2, "peak": 316000000}]
    assert bench_gguf.table(results, 2055000000, 1020000000) == [
        "file: 2.06 GB",
        "experts in memory  load, s  peak, GB",
        "all                   11.1      2.15",
        "room for 1.02 GB       2.2      0.32",
    ]
