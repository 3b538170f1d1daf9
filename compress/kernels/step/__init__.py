"""The kernels that advance the state of a decode step, plain and speculative."""
