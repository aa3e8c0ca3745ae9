"""The package's kernels on an NVIDIA GPU: a benchmark that replays what the host code encodes.

record.py                   the package's dispatches for a case, taken from the simulated device, as files
programs.py, peers_*.py     sequences of dispatches: the recorded ones, and those of the kernels beside ours
replay.py                   such a sequence on a GPU
run.py, timing.py           checks and times of a case
worker.py, report.py        cases in a process of their own, and the table
main.py                     the command line of scripts/bench/bench_gpu.py
"""
