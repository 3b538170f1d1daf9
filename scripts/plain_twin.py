"""What a program makes of one of our checkpoints, done plainly: this project's decoder in float32 over the
codes as they are decoded, with the inputs of its linears rounded as that program rounds them.

    scale = max |x| / largest      of a token, or of a group of its columns
    x ~ round(x / scale) * scale   to the nearest code; or round(x * (1 / scale)), which is another code now
                                   and then

Programs do not agree in it, and where an input falls between two codes the last bit decides, so two of them
answer as far apart as either is from inputs that are not rounded. Beside its own arithmetic done plainly a
program has no such excuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.export import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.weights import build_decoder
from compress.quant.scheme import QuantizedWeight

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Inputs:
    """How a program rounds the inputs of a linear."""

    dtype: torch.dtype
    largest: float
    group_size: int | None = None
    by_reciprocal: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        parts = x if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        scale = (parts.abs().amax(dim=-1, keepdim=True) / self.largest).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        scaled = parts * scale.reciprocal() if self.by_reciprocal else parts / scale
        codes = (
            scaled.round().clamp(-128, 127)
            if self.dtype == torch.int8
            else scaled.clamp(-448, 448).to(self.dtype).to(x.dtype)
        )
        return (codes * scale).reshape(x.shape)


FP8 = torch.float8_e4m3fn
INT8 = torch.int8
INPUTS = {
    ("compress", "FP8_DYNAMIC"): Inputs(FP8, 448.0),
    ("compress", "INT8_DYNAMIC"): Inputs(INT8, 127.0),
    ("compress", "FP8_BLOCK"): Inputs(FP8, 448.0, group_size=128),
    ("vllm", "FP8_DYNAMIC"): Inputs(FP8, 448.0, by_reciprocal=True),
    ("vllm", "INT8_DYNAMIC"): Inputs(INT8, 127.0, by_reciprocal=True),
    ("transformers", "FP8_DYNAMIC"): Inputs(FP8, 448.0),
    ("transformers", "INT8_DYNAMIC"): Inputs(INT8, 127.5),
}
"""(program, scheme) -> how it rounds on a CPU, as its sources say; where there is none, inputs stay as they
are. vLLM and transformers take FP8 in blocks as weights only there."""


def twin(path: Path, program: str) -> Decoder:
    """The model at `path` as `program` computes it; not rounded to the model's dtype anywhere.

    Only `transformers` decodes experts when it loads them, to the dtype of their scales, and multiplies all
    of a layer as one tensor: their inputs stay as they are.
    """
    checkpoint = open_checkpoint(path)
    decoder = build_decoder(checkpoint, dtype=torch.float32, device=CPU)
    for idx in range(checkpoint.arch.num_layers):
        for name, weight in checkpoint.layer(idx).items():
            if isinstance(weight, QuantizedWeight):
                if program == "transformers" and ".experts." in name:
                    continue
                linear = decoder.get_submodule(f"layers.{idx}.{name.removesuffix('.weight')}")
                linear.weight.data = weight.dequantize(torch.float32)
                if inputs := INPUTS.get((program, weight.scheme.name)):
                    linear.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs(x[0]))
    return decoder


@torch.no_grad()
def scores(decoder: Decoder, text: Sequence[int]) -> list[float]:
    """The log probability of every token after the first."""
    logprobs_SV = F.log_softmax(decoder(torch.tensor([text]))[0], dim=-1)
    return logprobs_SV[:-1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1).tolist()
