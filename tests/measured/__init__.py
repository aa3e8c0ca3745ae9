"""What is measured of this package's kernels without a Mac, beside MLX's kernels for the same work.

cases/     the calls, and what MLX launches for them
apple/     on the simulator's cost model of Apple GPUs (scripts/macos/apple_model)
air/       by Apple's compilation of others' kernels, in macOS wheels (scripts/macos/apple_air)
cuda/      on an NVIDIA GPU (scripts/bench/bench_gpu.py)
streamed   tokens/s with experts on a disk, on the simulator's timeline
"""
