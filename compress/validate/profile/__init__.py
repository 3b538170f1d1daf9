"""Profiles of serving: kernels, kinds of ops, the host, and the bound of prefill and decode.

steps.py     steps under the profiler: kernels, their own time, a trace
ops.py       kernels by kind of op
phases.py    prefill and decode of one engine against the floors of `roofline.py`, and the verdict
"""
