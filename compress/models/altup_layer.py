"""The alternating updates of a layer (`altup.py`).

Shapes: n streams, D hidden, E = n D.
"""

import torch
from torch import Tensor, nn

from compress.models.altup import corrected, predicted
from compress.models.arch import Arch
from compress.models.linear import Linear
from compress.models.norms import norm_of


class AltUp(nn.Module):
    """The prediction and the correction of a layer. `output_scale` multiplies the first stream where the
    layer reads it for the embeddings of tokens."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        num_streams = arch.altup_streams
        self.router = Linear(arch.hidden_size, num_streams, bias=False)
        self.router_norm = norm_of(arch, arch.hidden_size)
        self.predict = Linear(num_streams, num_streams**2, bias=False)
        self.correct = Linear(num_streams, num_streams, bias=False)
        self.output_scale = nn.Parameter(torch.ones(arch.hidden_size))

    def routed(self, x_D: Tensor) -> Tensor:
        """Return r of x, float32 [..., n]."""
        return torch.tanh(self.router(self.router_norm(x_D) * x_D.shape[-1] ** -1.0).to(torch.float32))

    def before(self, streams_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted streams [..., n D], and the first of them, which the layer reads."""
        size = len(self.output_scale)
        predicted_E = predicted(streams_E, self.routed(streams_E[..., :size]), self.predict.weight)
        return predicted_E, predicted_E[..., :size]

    def after(self, predicted_E: Tensor, y_D: Tensor) -> Tensor:
        """Return the corrected streams [..., n D] from the output of the layer."""
        return corrected(predicted_E, y_D, self.routed(y_D), self.correct.weight)
