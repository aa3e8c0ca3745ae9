"""MSL on an NVIDIA GPU: a translation to CUDA, and a benchmark that replays what the host code encodes.

translate.py, include/   MSL to CUDA C++: one simdgroup is a warp, one threadgroup a block
nvrtc.py                 CUDA C++ to machine code, on any machine
plan.py, record.py       the package's dispatches for a case, taken from the simulated device, as files
driver.py, run.py        those files on a GPU: inputs, launches, checks, times
cases.py, references.py  the cases: inputs, operator, what it must give
peers.py                 the kernels that ours stand beside
main.py                  the command line of scripts/bench_gpu.py
"""
