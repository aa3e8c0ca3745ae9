"""What ../apple and ../cuda measure, and what MLX launches for the same.

formats.py             how weights are stored: how they are made, what they stand for in float64
values.py              what inputs are made of
experts.py             experts and single matrices; attention.py
operators.py           a case of one operator, checked by the operator's oracle
layer.py               such cases of norms, combine and routing
fused.py               of kernels that also norm their input, add a residual, order outputs or apply a gate
mlx.py, mlx_*.py       what MLX dispatches for the same products, and on which Apple GPU
"""
