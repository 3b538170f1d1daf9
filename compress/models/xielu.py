"""xIELU (arXiv 2411.13010), the activation of an FFN without gates that has numbers of its own in each layer.

    xielu(x) = a_p x^2 + b x                            where x > 0
               a_n (e^min(x, eps) - 1 - x) + b x        elsewhere
    a_p = softplus(alpha_p),  a_n = b + softplus(alpha_n)

alpha_p and alpha_n are trained. b (`beta`) and eps are not; checkpoints store them, too, and what is stored
counts. The arithmetic is float32 and the result is rounded once: in a dtype of 16 bits `transformers` rounds
every step, and b x cancels a part of the other term of a negative x. eps keeps the exponential away from
zero, so xielu(0) is a_n (e^eps - 1), which is not zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")
"""The parameters of the activation in a layer, as it stores them: the first two are [1], the others []."""
LEARNED = ("alpha_p", "alpha_n")
"""The parameters that training changes."""
ALPHA = 0.8
BETA = 0.5
EPS = -1e-6
"""The first values of a_p and of a_n, and the values of b and eps."""


def initial_parameters() -> dict[str, Tensor]:
    """Return the parameters of a model that is not trained, float32."""

    def unsoftplus(x: float) -> Tensor:
        return torch.log(torch.expm1(torch.tensor([x])))

    values = (unsoftplus(ALPHA), unsoftplus(ALPHA - BETA), torch.tensor(BETA), torch.tensor(EPS))
    return dict(zip(PARAMETERS, values, strict=True))


def xielu_numbers(alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return a_p, a_n, b and eps of stored parameters, float32 [4], or float64 of such parameters."""
    wide = torch.promote_types(torch.float32, alpha_p.dtype)
    p, n, beta, eps = (each.to(wide).reshape(1) for each in (alpha_p, alpha_n, beta, eps))
    return torch.cat((F.softplus(p), beta + F.softplus(n), beta, eps))


def xielu(x: Tensor, numbers_4: Tensor) -> Tensor:
    """Return the activation of x, in its dtype; `numbers_4` are those of `xielu_numbers`."""
    wide = torch.promote_types(torch.float32, x.dtype)
    a_p, a_n, beta, eps = numbers_4.to(wide).unbind()
    x_wide = x.to(wide)
    positive = a_p * x_wide * x_wide
    negative = a_n * (torch.expm1(torch.minimum(x_wide, eps)) - x_wide)
    return (torch.where(x_wide > 0, positive, negative) + beta * x_wide).to(x.dtype)
