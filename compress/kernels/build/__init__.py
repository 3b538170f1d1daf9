"""Compilers of GPU kernels: Triton launches (`triton.py`) and CUDA sources built with NVRTC (`nvrtc.py`)."""
