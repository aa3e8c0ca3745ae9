"""MSL on an NVIDIA GPU: a translation to CUDA, and what runs it.

translate.py, include/      MSL to CUDA C++: one simdgroup is a warp, one threadgroup a block
nvrtc.py, compile.py        CUDA C++ to machine code, on any machine
plan.py                     dispatches that were recorded, as files
driver.py                   runs one on a GPU; simulated.py in the simulator, for tests
"""
