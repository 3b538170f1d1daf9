"""Fresh weights for a decoder that is trained from scratch (the reference model; later students and
drafts)."""

import torch

from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.experts import EXPERTS_OF_TOKENS
from compress.models.mamba1 import RATES
from compress.models.moe import table_in_turns

INIT_STD = 0.02


def fresh_decoder(arch: Arch, *, generator: torch.Generator) -> Decoder:
    """Return a float32 decoder on the CPU: matrices normal with std 0.02, those that write into the residual
    stream (`attn.o`, `delta.o`, `lightning.o`, `mamba1.o`, `mamba.o`, `conv.o`, `ffn.down`) divided
    by sqrt(2 * layers) as in GPT-2, norms one, biases zero. The rates of Mamba-1 mixers stay those of their
    module."""
    decoder = Decoder(arch)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(EXPERTS_OF_TOKENS):
                experts = arch.layers[int(name.split(".")[1])].experts
                assert experts is not None
                parameter.copy_(table_in_turns(*parameter.shape, num_experts=experts.num_experts))
            elif parameter.dim() >= 2 and not name.endswith(RATES):
                residual = name.endswith((".o.weight", "down.weight"))
                parameter.normal_(
                    0.0,
                    INIT_STD / (2 * arch.num_layers) ** 0.5 if residual else INIT_STD,
                    generator=generator,
                )
            elif name.endswith(".bias"):
                parameter.zero_()
    return decoder
