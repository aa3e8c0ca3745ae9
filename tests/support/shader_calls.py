"""`torch.mps.compile_shader` for tensors on the CPU, whose kernels the simulator runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from simulator import shader_library


class Library:
    """Stands for what `torch.mps.compile_shader` returns: its kernels are attributes."""

    def __init__(self, source: str):
        self._library = shader_library(source)
        self.launches: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def run(*tensors: torch.Tensor, threads: Sequence[int], group_size: Sequence[int]) -> None:
            groups = [total // size for total, size in zip(threads, group_size, strict=True)]
            # A buffer is the memory from a tensor's first element on.
            whole = {tensor.data_ptr(): _from_start(tensor) for tensor in tensors}
            buffers = {index: whole[tensor.data_ptr()] for index, tensor in enumerate(tensors)}
            self._library.launch(name, buffers, groups, group_size)
            self.launches.append(name)

        return run


def _from_start(tensor: torch.Tensor) -> Any:
    start = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    return tensor.detach().as_strided((size,), (1,), start)
