"""What a program makes of one of our checkpoints, done plainly: this project's decoder in float32 over the
codes as they are decoded, with the inputs of its linears rounded as that program rounds them.

    scale = max |x| / largest      of a token, or of a group of its columns
    x ~ round(x / scale) * scale   to the nearest code; or round(x * (1 / scale)), which is another code now
                                   and then

Programs do not agree in it, and where an input falls between two codes the last bit decides, so two of them
answer as far apart as either is from inputs that are not rounded. Beside its own arithmetic done plainly a
program has no such excuse.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.export import open_checkpoint
from compress.kernels.operands.rows import input_quant, quantize
from compress.models.decoder import Decoder
from compress.models.weights import build_decoder
from compress.quant.scheme import QuantizedWeight, Scheme
from scripts.interop_families import STACKED

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Inputs:
    """How a program rounds the inputs of a linear."""

    dtype: torch.dtype
    largest: float
    group_size: int | None = None
    by_reciprocal: bool = False
    one_scale: bool = False  # of all tokens that a call has, not one of each
    scale: float | None = None  # of all inputs, calibrated

    def __call__(self, x: Tensor) -> Tensor:
        parts = x if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        largest = parts.abs().amax(dim=() if self.one_scale else -1, keepdim=True)
        scale = (largest / self.largest).clamp_min(torch.finfo(torch.float32).tiny)
        scale = scale if self.scale is None else torch.full_like(scale, self.scale)
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
    ("onnxruntime", "INT8_DYNAMIC"): Inputs(INT8, 127.0),
    ("onnxruntime_genai", "INT8_DYNAMIC"): Inputs(INT8, 127.0),
    ("vllm", "FP8_DYNAMIC"): Inputs(FP8, 448.0, by_reciprocal=True),
    ("vllm", "INT8_DYNAMIC"): Inputs(INT8, 127.0, by_reciprocal=True),
    ("transformers", "FP8_DYNAMIC"): Inputs(FP8, 448.0),
    ("transformers", "FP8_STATIC"): Inputs(FP8, 448.0),
    ("transformers", "INT8_DYNAMIC"): Inputs(INT8, 127.5),
    ("transformers", "W4A8_FP8"): Inputs(FP8, 448.0),
    ("transformers", "FP8_BLOCK"): Inputs(FP8, 448.0, group_size=128),
}
"""(another program, scheme) -> how it rounds on a CPU, as its sources say; where there is none, inputs stay
as they are. vLLM takes FP8 in blocks as weights only there."""
WEIGHTS_ONLY = (("transformers", "fp8"),)
"""(program, quant_method) of which a CPU rounds no inputs: transformers decompresses blocks of fp8."""
FLAT_SHARED = ("qwen2_moe", "ernie4_5_moe")
"""Families of which `transformers` calls the shared expert with tokens x columns. compressed-tensors keeps a
scale for each index of the first two dimensions, and of no more than two it takes one scale for all."""


def own_inputs(weight: QuantizedWeight) -> Callable[[Tensor], Tensor] | None:
    """Return how this runtime rounds the inputs of a linear: the definition that its kernels are tested
    against. None where it leaves them as they are."""
    quant = input_quant([weight], CPU)
    if quant is None:
        return None
    return lambda x: quantize(x.flatten(0, -2), quant).dequantize(x.dtype).view_as(x)


def inputs_of(
    program: str, family: str, name: str, scheme: Scheme, *, input_scale: Tensor | None = None
) -> Inputs | None:
    """Return how a program rounds the inputs of a linear, or None where it leaves them as they are."""
    inputs = INPUTS.get((program, scheme.name))
    if inputs and input_scale is not None:
        return replace(inputs, scale=float(input_scale))
    flat = program == "transformers" and family in FLAT_SHARED and name.startswith("moe.shared.")
    return replace(inputs, one_scale=True) if inputs and flat else inputs


def twin(path: Path, program: str) -> Decoder:
    """The model at `path` as `program` computes it; not rounded to the model's dtype, but for experts that
    `transformers` computes in it (`_merge`)."""
    checkpoint = open_checkpoint(path)
    arch = checkpoint.arch
    stated = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    rounds = (program, stated.get("quant_method")) not in WEIGHTS_ONLY
    decoder = build_decoder(checkpoint, dtype=torch.float32, device=CPU)
    for idx in range(arch.num_layers):
        for name, weight in checkpoint.layer(idx).items():
            merged = program == "transformers" and ".experts." in name and arch.family not in STACKED
            if not merged and not isinstance(weight, QuantizedWeight):
                continue
            linear = decoder.get_submodule(f"layers.{idx}.{name.removesuffix('.weight')}")
            assert isinstance(linear, torch.nn.Linear)
            if merged:
                _merge(linear, weight)
            elif isinstance(weight, QuantizedWeight):
                linear.weight.data = weight.dequantize(torch.float32)
                inputs: Callable[[Tensor], Tensor] | None
                if program == "compress":
                    inputs = own_inputs(weight)
                else:
                    inputs = inputs_of(
                        program, arch.family, name, weight.scheme, input_scale=weight.input_scale
                    )
                if rounds and inputs is not None:
                    linear.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs(x[0]))
    return decoder


def _merge(linear: torch.nn.Linear, weight: Tensor | QuantizedWeight) -> None:
    """Let a linear of an expert compute as in `transformers`, which makes one tensor of all experts of a
    layer when it loads a quantized checkpoint that keeps them apart.

    Their inputs are not rounded to codes. Float codes become weights of the dtype that was asked for;
    integer codes those of the scales' dtype, and dense experts keep the file's, and both of these
    compute in it.
    """
    if isinstance(weight, QuantizedWeight):
        exact = weight.scheme.type == "float"
        linear.weight.data = weight.dequantize(torch.float32 if exact else None)
    else:
        linear.weight.data = weight
    linear.register_forward_pre_hook(lambda module, x: x[0].to(module.weight.dtype))


@torch.no_grad()
def scores(decoder: Decoder, text: Sequence[int]) -> list[float]:
    """The log probability of every token after the first."""
    logprobs_SV = F.log_softmax(decoder(torch.tensor([text]))[0], dim=-1)
    return logprobs_SV[:-1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1).tolist()
