"""Activations of FFNs (arXiv 2002.05202, 2109.08668) and of gated attention in Triton kernels, in float32.

    silu(x) = x s(x)                         s(x) = 1 / (1 + e^-x)
    gelu(x) = x / 2 (1 + erf(x / sqrt 2))    gelu_pytorch_tanh(x) = x s(2 sqrt(2/pi) (x + 0.044715 x^3))
    relu(x) = max(x, 0)                      relu2(x) = max(x, 0)^2
    xielu(x) = a_p x^2 + b x where x > 0, else a_n (e^min(x, eps) - 1 - x) + b x       (arXiv 2411.13010)
    swiglu_clamped(g, u) = g s(1.702 g) (u + 1) of g <= 7 and |u| <= 7

The sigmoid s gates the outputs of attention. 1 + tanh(u) = 2 s(2u) has no cancellation and needs no tanh.
"""

from compress.kernels.compilers.triton import INTERPRETED, jit, tl


@jit()
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return 1 / (1 + e^-x). Results below 2^-126 are zero on a GPU: the exponential and the division need no
    tests for them."""
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e;}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@jit()
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        return x * sigmoid(x)
    elif ACTIVATION == "sigmoid":
        return sigmoid(x)
    elif ACTIVATION == "gelu":
        return x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        return tl.where(x < 0, 0.0, x * x)
    else:
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@jit()
def clamped(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Return swiglu_clamped of a gate and an up."""
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return gate * sigmoid(1.702 * gate) * (up + 1)


@jit()
def xielu(x: tl.tensor, numbers_ptr: tl.tensor) -> tl.tensor:
    """Return xIELU with the numbers a_p, a_n, b and eps of a layer, which are float32.

    e^t - 1 loses a small t, so from -1/2 on e^t - 1 - t is its series; what follows t^9 is less than
    3e-9 of it."""
    a_p = tl.load(numbers_ptr)
    a_n = tl.load(numbers_ptr + 1)
    beta = tl.load(numbers_ptr + 2)
    eps = tl.load(numbers_ptr + 3)
    t = tl.minimum(x, eps)
    series = 1 / 5040 + t * (1 / 40320 + t * (1 / 362880))
    series = 1 / 24 + t * (1 / 120 + t * (1 / 720 + t * series))
    series = t * t * (1 / 2 + t * (1 / 6 + t * series))
    rest = tl.where(t > -0.5, series, tl.exp(t) - 1 - t)
    return tl.where(x > 0, a_p * x * x, a_n * (rest + (t - x))) + beta * x
