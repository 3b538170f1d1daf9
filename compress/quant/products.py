"""Products of float32 matrices on tensor cores: each factor as the sum of two bfloat16 numbers, which hold 16
of its 24 bits.

    A B ~ A1 B1 + A1 B2 + A2 B1,   A1 = bf16(A), A2 = bf16(A - A1)

Products of bfloat16 numbers are exact in float32, where they are summed; the part left out is 2^-16 of A B.
An H200 multiplies float32 at 51 TFLOP/s (`torch.mm` without TF32), and bfloat16 at more than ten times that.
For losses and errors, which are compared and reported, not for values that are stored.

Shapes: [M, K] times [K, N].
"""

import torch
from torch import Tensor


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return A B in float32, [M, N]; on a CPU, by float32 arithmetic."""
    if not a_MK.is_cuda:
        return a_MK @ b_KN
    high_a = a_MK.to(torch.bfloat16)
    high_b = b_KN.to(torch.bfloat16)
    low_a = (a_MK - high_a).to(torch.bfloat16)
    low_b = (b_KN - high_b).to(torch.bfloat16)
    total_MN = torch.mm(high_a, high_b, out_dtype=torch.float32)
    total_MN += torch.mm(high_a, low_b, out_dtype=torch.float32)
    total_MN += torch.mm(low_a, high_b, out_dtype=torch.float32)
    return total_MN
