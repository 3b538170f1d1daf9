"""The divergence of two models through their heads, a slice of tokens at a time, so that the logits of a
whole batch never exist.

For each slice: student's and teacher's logits, loss and its gradient by the student's logits
(`losses.divergence_rows`), and from it at once the gradients by hidden states and head. The backward pass
only scales these, so no product is computed twice: 6 T D V operations for the student's head and 2 T D V
for the teacher's, and a peak of a few [slice, V], where a batch of 16,384 tokens with a vocabulary of
128,256 needs 8.4 GB for a single float32 copy.

Shapes: T tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.distill.losses import Divergence, TopK, divergence_rows

Rows = Callable[[Tensor, Tensor | TopK, Tensor, Divergence], tuple[Tensor, Tensor]]
Targets = Callable[[slice], Tensor | TopK]
"""The teacher's answer for some tokens: logits, or the likeliest tokens that were kept of them."""
SLICE_VALUES = {"cuda": 1 << 27, "cpu": 1 << 22}
"""Values of one [slice, V] on a GPU and on a CPU; 0.5 GB and 16 MB in float32."""


def slices(num_tokens: int, vocab_size: int, device: torch.device) -> list[slice]:
    """Cut tokens into slices of nearly equal length: a compiled function is compiled for each length."""
    most = max(1, SLICE_VALUES.get(device.type, 1 << 22) // vocab_size)
    size = -(-num_tokens // -(-num_tokens // most))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def mean_divergence(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets: Targets,
    labels_T: Tensor,
    loss: Divergence,
    *,
    rows: Rows = divergence_rows,
    softcap: float | None = None,
    weights_T: Tensor | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Return the mean over tokens of the loss between the student's logits hidden @ head^T + bias and the
    targets, times `weights_T` if given; differentiable by hidden, head and bias.

    Products are in the hidden states' dtype. `rows` may be a compiled `divergence_rows`. The student's logits
    are capped to `softcap` tanh(logits / `softcap`) if one is given.
    """
    return _HeadDivergence.apply(  # type: ignore[no-untyped-call]
        hidden_TD, head_VD, bias_V, targets, labels_T, loss, rows, softcap, weights_T
    )


class _HeadDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        targets: Targets,
        labels_T: Tensor,
        loss: Divergence,
        rows: Rows,
        softcap: float | None,
        weights_T: Tensor | None,
    ) -> Tensor:
        num_tokens = hidden_TD.shape[0]
        weight_VD = head_VD.to(hidden_TD.dtype)
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_head_VD = torch.zeros_like(head_VD) if wants_head else None
        grad_bias_V = torch.zeros_like(bias_V) if bias_V is not None and wants_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for part in slices(num_tokens, head_VD.shape[0], hidden_TD.device):
                logits_TV = hidden_TD[part] @ weight_VD.T
                if bias_V is not None:
                    logits_TV = logits_TV + bias_V.to(logits_TV.dtype)
                if softcap is not None:
                    logits_TV = softcap * torch.tanh(logits_TV / softcap)
                loss_T, grad_TV = rows(logits_TV, targets(part), labels_T[part], loss)
                if softcap is not None:
                    grad_TV = grad_TV * (1 - (logits_TV / softcap).square())
                if weights_T is not None:
                    loss_T = loss_T * weights_T[part]
                    grad_TV = grad_TV * weights_T[part].to(grad_TV.dtype).unsqueeze(1)
                total += loss_T.sum()
                if grad_hidden_TD is not None:
                    torch.mm(grad_TV, weight_VD, out=grad_hidden_TD[part])
                if grad_head_VD is not None:
                    grad_head_VD += grad_TV.T @ hidden_TD[part]
                if grad_bias_V is not None:
                    grad_bias_V += grad_TV.sum(0, dtype=grad_bias_V.dtype)
        ctx.save_for_backward(grad_hidden_TD, grad_head_VD, grad_bias_V)
        ctx.num_tokens = num_tokens
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Scale the gradients that `forward` made, in place: a loss is propagated once."""
        scale = grad_outputs[0] / ctx.num_tokens
        grads: Sequence[Tensor | None] = ctx.saved_tensors
        return (
            *(None if grad is None else grad.mul_(scale) for grad in grads),
            *(None,) * 6,
        )
