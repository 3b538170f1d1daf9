"""Muon: momentum whose matrix is made nearly orthogonal before it is applied (K. Jordan 2024; scaled as in
arXiv 2502.16982, section 2.2).

It trains the matrices inside a model's layers; embeddings, heads and vectors are trained by AdamW. The
update's root mean square is brought to that of AdamW (0.2 * sqrt(longer side)), so that both optimizers
share learning rate and weight decay. `torch.optim.Muon` computes the same one matrix at a time; here all
matrices of one shape run as one batch, which on a small model is the difference between a third of the
step and a twentieth.

Shapes: N matrices of one shape, O rows, I columns.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic with the steepest start: singular values land in about [0.7, 1.2]
_NUM_ITERATIONS = 5
_RMS_OF_ADAMW = 0.2


def orthogonalise(matrices_NOI: Tensor) -> Tensor:
    """Return bfloat16 [N, O, I]: approximately U V^T of each matrix U S V^T, by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    tall = matrices_NOI.shape[-2] > matrices_NOI.shape[-1]
    x = matrices_NOI.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum over `params`, which must all be matrices and all have a gradient at every step."""

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                gradient_NOI = torch.stack([p.grad for p in parameters if p.grad is not None])
                state = self.state[parameters[0]]  # one buffer for all of a shape
                if not state:
                    state["momentum"] = torch.zeros_like(gradient_NOI)
                momentum_NOI = state["momentum"].lerp_(gradient_NOI, 1 - group["momentum"])
                update_NOI = orthogonalise(gradient_NOI.lerp_(momentum_NOI, group["momentum"]))
                scale = _RMS_OF_ADAMW * max(shape) ** 0.5
                for parameter, update_OI in zip(parameters, update_NOI, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                        update_OI, alpha=-group["lr"] * scale
                    )
