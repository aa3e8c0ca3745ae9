"""What Apple's compiler has made of public kernels, in macOS wheels (scripts/macos/apple_air).

front_end.py     MLX's kernels beside our IR of the same source
tensor_units.py  others' calls of Metal 4's tensor operations beside ours
"""
