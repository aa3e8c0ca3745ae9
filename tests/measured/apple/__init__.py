"""What the package's kernels would cost on Apple GPUs.

cases.py        experts' matmuls of a shape and format: our operators, and what MLX does for the same
mlx.py          MLX's launches (../cases/mlx.py), counted
published.py    published measurements, beside what the model predicts
quantising.py   quantising a model by importance, beside reading it
report.py       the tables of scripts/macos/apple_model
"""
