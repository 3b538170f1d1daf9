"""The compilers of kernels: Triton, and CUDA C++ through NVRTC; each file also launches what it compiles."""
