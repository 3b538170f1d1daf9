"""Activations of FFNs (arXiv 2002.05202, 2109.08668) and of gated attention in Triton kernels, in float32.

    silu(x) = x s(x)                         s(x) = 1 / (1 + e^-x)
    gelu(x) = x / 2 (1 + erf(x / sqrt 2))    gelu_pytorch_tanh(x) = x s(2 sqrt(2/pi) (x + 0.044715 x^3))
    relu2(x) = max(x, 0)^2

The sigmoid s gates the outputs of attention. 1 + tanh(u) = 2 s(2u) has no cancellation and needs no tanh.
"""

from compress.kernels.compilers.triton import jit, tl


@jit()
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == "sigmoid":
        return 1 / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        return tl.where(x < 0, 0.0, x * x)
    else:
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
