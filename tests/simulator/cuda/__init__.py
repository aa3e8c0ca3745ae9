"""MSL on an NVIDIA GPU: a translation to CUDA, and a benchmark that replays what the host code encodes.

translate.py, include/      MSL to CUDA C++: one simdgroup is a warp, one threadgroup a block
nvrtc.py, compile.py        CUDA C++ to machine code, on any machine
record.py, plan.py          the package's dispatches for a case, taken from the simulated device, as files
programs.py, peers_*.py     sequences of dispatches: the recorded ones, and those of the kernels beside ours
replay.py, driver.py        such a sequence on a GPU; simulated.py: in the simulator, for the tests
run.py, timing.py           checks and times of a case
worker.py, report.py        cases in a process of their own, and the table
main.py                     the command line of scripts/bench_gpu.py
"""
