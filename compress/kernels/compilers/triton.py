"""Foundations of every Triton kernel: an import that may fail, and programmatic dependent launch (PDL).

The file of a Triton kernel takes `triton`, `tl` and `jit` from here, so that it can be imported, and
listed with its refusal, on a machine without triton; its `supports` begins with `triton_refusal`.

PDL (CUDA programming guide, "programmatic dependent launch and synchronization"): a kernel may be
scheduled while the one before it still runs. Every kernel calls `launch_dependents(PDL)` first, and
`wait(PDL)` before it touches anything that another kernel writes or reads: only constants (weights) may
be read earlier. Every program of every kernel waits, so that the end of a kernel implies the end of all
before it. `pdl_options` gives the launch attribute and the constexpr `PDL`:

    @jit()
    def _kernel(x_ptr: tl.tensor, PDL: tl.constexpr) -> None:
        launch_dependents(PDL)
        wait(PDL)
        ...

    _kernel[grid](x, **pdl_options(x.device))
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compress.kernels.problem import Problem, compute_capability

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the names that are read when a kernel's file is imported
    triton = None
    tl = SimpleNamespace(constexpr=object, tensor=object)

__all__ = [
    "FP8_SM",
    "describable",
    "interpreted",
    "jit",
    "launch_dependents",
    "pdl_enabled",
    "pdl_options",
    "tensor_descriptor",
    "tl",
    "triton",
    "triton_refusal",
    "wait",
]

PDL_SM = 90
FP8_SM = 89
"""Compute capability times ten from which on Triton supports e4m3."""


def jit(*, varying: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function by `triton.jit`; return the function itself where triton is not installed.

    Triton compiles a kernel anew for integers that are 1 or multiples of 16 and for pointers aligned to
    16 bytes. `varying` names the integers, and `unaligned` the pointers of one element a lane, that
    change from call to call and must not trigger that.
    """
    if triton is None:
        return lambda function: function
    return triton.jit(do_not_specialize=list(varying), do_not_specialize_on_alignment=list(unaligned))


def interpreted() -> bool:
    """Return whether kernels run in triton's interpreter on the CPU; triton decides when it is first
    imported (TRITON_INTERPRET)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


INTERPRETED = tl.constexpr(interpreted()) if triton is not None else interpreted()
"""`interpreted()`, for kernels."""


def triton_refusal(problem: Problem) -> str | None:
    """Return the reason why no Triton kernel can serve the problem, or None. Kernels compute e4m3 in integers
    where the device has no instruction for it (`operands/e4m3.py`)."""
    if triton is None:
        return "triton is not installed"
    if not problem.device.startswith("cuda") and not interpreted():
        return f"Triton kernels run on CUDA devices and this one is {problem.device}"
    return None


def describable(values: Tensor) -> bool:
    """Return whether `tensor_descriptor` describes these values as a matrix: contiguous rows of multiples of
    16 bytes, which heads of 100 numbers are not."""
    return values.is_contiguous() and values.shape[-1] * values.element_size() % 16 == 0


def tensor_descriptor(matrix: Tensor, box: list[int]) -> Any:
    """Describe a contiguous matrix, from which a kernel loads boxes [rows, columns] by Hopper's tensor copy
    engine (sm_90)."""
    return TensorDescriptor.from_tensor(matrix, box)


def pdl_enabled(device: torch.device) -> bool:
    """Return whether kernels on this device are launched as programmatic dependents."""
    return compute_capability(device) >= PDL_SM and not interpreted()


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return the keyword arguments of a Triton launch: `PDL` for the kernel, and the launch attribute where
    it applies."""
    return {"PDL": True, "launch_pdl": True} if pdl_enabled(device) else {"PDL": False}


@jit()
def launch_dependents(PDL: tl.constexpr) -> None:
    """Let the next kernel start; do nothing where PDL is off."""
    if PDL:
        gdc_launch_dependents()


@jit()
def wait(PDL: tl.constexpr) -> None:
    """Wait until every kernel before this one is done and its writes are visible; do nothing where PDL is
    off."""
    if PDL:
        gdc_wait()
