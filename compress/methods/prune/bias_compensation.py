"""What goes is replaced by its mean (FLAP, arXiv 2312.11983): the linear's bias takes W_removed E[x_removed].

Of all constants the mean leaves the least squared error, so this never does worse than nothing on the text it is measured on. Only a linear
that can have a bias can have this: `attn.o` and `ffn.down` of Llama, by `attention_bias` and `mlp_bias` of its config, `attn.o` of Qwen3.
"""

from typing import Literal

from torch import Tensor

from compress.calibrate.stats import InputStats, Mean, Stat
from compress.methods.prune import COMPENSATIONS, Compensated, Compensation


@COMPENSATIONS.register("bias")
class BiasCompensation(Compensation):
    kind: Literal["bias"] = "bias"

    @property
    def needs_bias(self) -> bool:
        return True

    def needs(self) -> tuple[type[Stat], ...]:
        return (Mean,)

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        return Compensated(w_OI[:, kept_I], w_OI[:, ~kept_I] @ stats[Mean].mean()[~kept_I])
