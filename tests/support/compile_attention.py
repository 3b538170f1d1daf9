"""Compiles every Triton kernel of attention and of rope_store for `sm_<argument>`, on a machine without a
GPU: run by a test, in a process of its own, because it replaces triton's driver.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compress.kernels.attention_decode import paged as decode
from compress.kernels.attention_prefill import paged as prefill
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.rows import FP8
from compress.kernels.rope_store import fused

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


class AbsentDevice:
    """What triton asks a driver for, to compile but not to load."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_all(sm: int) -> list[Any]:
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentDevice(sm))
    for module in (decode, prefill, fused):
        module.pdl_options = lambda device: {  # type: ignore[attr-defined]
            "PDL": sm >= 90,
            "launch_pdl": sm >= 90,
        }
    for head_dim in (80, 128, 256, 512):
        for page_dtype in (torch.bfloat16, FP8):
            k, v = (torch.zeros(2, 4, 64, head_dim, dtype=page_dtype) for _ in range(2))
            scales = [torch.zeros(2, 4, 64)] * 2 if page_dtype == FP8 else []
            kv = PagedKV(k, v, *scales)
            table = torch.zeros(2, 3, dtype=torch.int32)
            lens = torch.ones(2, dtype=torch.int32)
            q = torch.zeros(16, 8, head_dim, dtype=torch.bfloat16)
            for q_len, softcap in ((1, None), (8, None), (8, 50.0)):
                decode.attention_decode(
                    q[: 2 * q_len], kv, table, lens, q_len=q_len, window=None, scale=1.0, softcap=softcap
                )
            for softcap in (None, 50.0):
                prefill.attention_prefill(
                    q, kv, table, (7, 9), (70, 9), window=50, scale=1.0, softcap=softcap
                )
            qkv = torch.zeros(16, 12 * head_dim, dtype=q.dtype)
            rope = torch.zeros(8, head_dim, dtype=q.dtype)
            rows = torch.zeros(16).long()
            for whole, dtype in ((False, q.dtype), (True, torch.float32)):
                fused.rope_store(
                    qkv,
                    rope,
                    rope,
                    rows,
                    rows,
                    kv,
                    num_heads=8,
                    qk_norm=torch.zeros(10, head_dim, dtype=dtype),
                    eps=1e-5,
                    whole=whole,
                    centered=whole,
                    growth_P=rope[:, 0].contiguous() if whole else None,
                )
    return compiled


if __name__ == "__main__":
    device_sm = int(sys.argv[1])
    for kernel in compile_all(device_sm):
        assert kernel.metadata.shared <= SHARED_BYTES[device_sm], (
            f"{kernel.metadata.name} needs {kernel.metadata.shared} bytes"
        )
