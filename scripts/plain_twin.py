"""What a program makes of one of our checkpoints, done plainly: this project's decoder in float32 over the
codes as they are decoded, with the inputs of its linears rounded as that program rounds them
(`program_inputs.py`).

Programs do not agree in it, and where an input falls between two codes the last bit decides, so two of them
answer as far apart as either is from inputs that are not rounded. Beside its own arithmetic done plainly a
program has no such excuse.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.export import open_checkpoint
from compress.kernels.operands.rows import input_quant, quantize
from compress.models.decoder import Decoder
from compress.models.layer_shape import XIELU
from compress.models.weights import build_decoder
from compress.quant.scheme import QuantizedWeight
from scripts.interop_families import STACKED
from scripts.program_inputs import inputs_of

CPU = torch.device("cpu")
WEIGHTS_ONLY = (("transformers", "fp8"),)
"""(program, quant_method) of which a CPU rounds no inputs: transformers decompresses blocks of fp8."""


def rounding(
    program: str, family: str, name: str, weight: QuantizedWeight
) -> Callable[[Tensor], Tensor] | None:
    """Return how a program rounds the inputs of a linear, or None where it leaves them as they are. This
    runtime does it by the definition that its kernels are tested against."""
    if program != "compress":
        inputs = inputs_of(program, family, name, weight.scheme)
        return None if inputs is None else partial(inputs, weight=weight)
    quant = input_quant([weight], CPU)
    if quant is None:
        return None
    return lambda x: quantize(x.flatten(0, -2), quant).dequantize(x.dtype).view_as(x)


def twin(path: Path, program: str) -> Decoder:
    """The model at `path` as `program` computes it, in float32.

    `transformers` makes one tensor of all experts of a layer when it loads a checkpoint that keeps them
    apart: their inputs are not rounded, and integer codes become weights in the dtype of their scales. So do
    codes whose inputs keep 16 bits in this runtime, for prompts.
    """
    checkpoint = open_checkpoint(path)
    arch = checkpoint.arch
    stated = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    rounds = (program, stated.get("quant_method")) not in WEIGHTS_ONLY
    decoder = build_decoder(checkpoint, dtype=torch.float32, device=CPU)
    for idx in range(arch.num_layers):
        for name, weight in checkpoint.layer(idx).items():
            if not isinstance(weight, QuantizedWeight):
                continue
            linear = decoder.get_submodule(f"layers.{idx}.{name.removesuffix('.weight')}")
            assert isinstance(linear, torch.nn.Linear)
            merged = program == "transformers" and ".experts." in name and arch.family not in STACKED
            ours = program == "compress" and weight.scheme.activation is None
            in_16_bits = ours or (merged and weight.scheme.type == "int")
            linear.weight.data = weight.dequantize(None if in_16_bits else torch.float32).float()
            inputs = rounding(program, arch.family, name, weight)
            if rounds and not merged and inputs is not None:
                linear.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs(x[0]))
    if program == "vllm" and arch.activation == XIELU:
        round_activations_(decoder)
    return decoder


def round_activations_(decoder: Decoder) -> None:
    """Round the factors of xIELU as vLLM does, which computes them in bfloat16 in a model of any dtype."""
    for layer in decoder.layers:
        ffn = layer.ffn
        for stored, below in ((ffn.alpha_p, 0.0), (ffn.alpha_n, float(ffn.beta))):
            factor = (below + F.softplus(stored.bfloat16())).bfloat16().float()
            stored.data = torch.log(torch.expm1(factor - below))


@torch.no_grad()
def rated(decoder: Decoder, text: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return the log probability of every token after the first, and the likeliest token at its place."""
    logprobs_SV = F.log_softmax(decoder(torch.tensor([text]))[0], dim=-1)[:-1]
    logprobs = logprobs_SV.gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1).tolist()
    return logprobs, logprobs_SV.argmax(dim=-1).tolist()


def scores(decoder: Decoder, text: Sequence[int]) -> list[float]:
    """Return the log probability of every token after the first."""
    return rated(decoder, text)[0]
