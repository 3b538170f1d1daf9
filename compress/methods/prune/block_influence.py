"""Block influence (ShortGPT, arXiv 2403.03853): a layer matters as much as it turns the residual stream.

    BI(l) = 1 - E[ cos(x_l, x_{l+1}) ]

over tokens, with x_l the input of layer l and x_{l+1} its output. Directions only: a layer that scales the
stream has no influence. Each layer is measured in the whole model, so the scores do not predict what removing
two layers at once does.

Shapes: T tokens of one sample, D hidden.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.methods.prune import LAYER_SCORERS, LayerScorer


@LAYER_SCORERS.register("block_influence")
class BlockInfluence(LayerScorer):
    """Layers that turn the residual stream least are removed."""

    kind: Literal["block_influence"] = "block_influence"

    def influence(self, before_TD: Tensor, after_TD: Tensor) -> Tensor:
        cosine_T = F.cosine_similarity(before_TD.to(torch.float32), after_TD.to(torch.float32), dim=1)
        return (1 - cosine_T).sum(dtype=torch.float64)
