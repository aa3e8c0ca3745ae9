"""Tensors and quantised matrices on the device, of random numbers that are the same every time."""

import torch

from support.quantized_layers import place, random_matrix

INT4 = "affine4_64"


def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to("mps")


def matrix(rows: int, columns: int, form=INT4) -> list:
    return place(random_matrix(rows, columns, form, torch.float16, 0), "mps")
