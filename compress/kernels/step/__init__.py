"""Kernels that advance the device state of a decode step: `decode` for plain steps, `verify` for speculative
ones.
"""
