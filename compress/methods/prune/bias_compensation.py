"""What goes is replaced by its mean (FLAP, arXiv 2312.11983): the linear's bias takes W_removed E[x_removed].

Of all constants the mean leaves the least squared error, so this never does worse than nothing on the text it is measured on. Only a linear
that can have a bias can have this: `attn.o` and `ffn.down` of Llama, by `attention_bias` and `mlp_bias` of its config, `attn.o` of Qwen3.
"""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from compress.calibrate.stats import Mean, Stat, StatFactory
from compress.methods.prune import COMPENSATIONS, Compensated
from compress.recipe import Spec


@COMPENSATIONS.register("bias")
class BiasCompensation(Spec):
    kind: Literal["bias"] = "bias"

    @property
    def needs_bias(self) -> bool:
        return True

    def stats(self) -> Mapping[str, StatFactory]:
        return {"mean": Mean}

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: Mapping[str, Stat]) -> Compensated:
        mean = stats["mean"]
        assert isinstance(mean, Mean)
        return Compensated(w_OI[:, kept_I], w_OI[:, ~kept_I] @ mean.mean()[~kept_I])
