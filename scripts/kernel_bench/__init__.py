"""The parts of `bench_kernels.py`: cases of every op, and the timer."""
