"""What ../apple and ../cuda measure, and what MLX launches for the same.

formats.py             how weights are stored: how they are made, what they stand for in float64
values.py              what inputs are made of
experts.py             experts and single matrices; attention.py; layer.py: norms, combine, routing
fused.py               kernels that also norm their input, add a residual, order their outputs or apply a gate
mlx.py, mlx_*.py       what MLX dispatches for the same products, and on which Apple GPU
"""
