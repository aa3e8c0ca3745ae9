"""What the cost model (apple/) and the run on a GPU (cuda/) measure, and what MLX launches for the same.

formats.py             how weights are stored: how they are made, what they stand for in float64
values.py              what inputs are made of
experts.py             experts and single matrices; attention.py; layer.py: norms, combine, routing
mlx.py, mlx_*.py       what MLX dispatches for the same products, and on which Apple GPU
"""
