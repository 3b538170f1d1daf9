"""`dequantize`: the weights of a model that was published in codes, such as DeepSeek-R1 in FP8, as numbers of
the model's own dtype. The stages after it have a dense model."""

import torch

from compress.artifact.atomic import place
from compress.artifact.writer import ArtifactWriter
from compress.calibrate.data_free import run_data_free
from compress.context import Context
from compress.errors import UnsupportedFormat, UsageError
from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name
from compress.models.weights import Dense, without_codes
from compress.recipe import Spec
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port


class Dequantize(Spec):
    """The model's codes times their scales, rounded to its dtype. Nothing is to be chosen."""


def check_dense(arch: Arch, reason: str) -> None:
    """Refuse a model whose weights are codes, for a reason.

    Raises:
        UnsupportedFormat: they are.
    """
    if config := arch.config.get("quantization_config"):
        raise UnsupportedFormat(
            f"the model is quantized already (quant_method '{config.get('quant_method')}'), and {reason}. "
            "Name the dense model that it was made from, or put `kind: dequantize` before this stage if it "
            "was published so."
        )


def _check_model(arch: Arch) -> str:
    """Return the `quant_method` of a model.

    Raises:
        UsageError: its weights are no codes.
    """
    config = arch.config.get("quantization_config")
    if not config:
        raise UsageError(
            "dequantize: the model's weights are dense already, or are read so. Remove this stage from the "
            "recipe."
        )
    return str(config.get("quant_method"))


def _reshape(spec: Dequantize, arch: Arch) -> Arch:
    return without_codes(arch)


def _estimate(spec: Dequantize, facts: PlanFacts) -> Estimate:
    arch = facts.arch
    method = _check_model(arch)
    itemsize = getattr(torch, arch.dtype).itemsize
    disk_bytes = itemsize * arch.num_params
    largest = max(arch.num_outer_params, arch.num_linear_params // arch.num_layers)
    return Estimate(
        peak_bytes=4 * itemsize * largest,
        disk_bytes=disk_bytes,
        flops=0.0,
        moved_bytes=2 * disk_bytes,
        notes=(f"{method} -> {arch.dtype}",),
    )


@STAGES.stage(
    "dequantize",
    version=1,
    takes=(Port.DENSE,),
    gives=Port.DENSE,
    spec=Dequantize,
    estimate=_estimate,
    reshape=_reshape,
)
def dequantize(spec: Dequantize, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    stored = open_weights(inputs[Port.DENSE].path)
    method = _check_model(stored.arch)
    source = Dense(stored)
    run_data_free(source, [], ctx.scratch, ctx)
    for name in (OUTER_NAME, *map(layer_name, range(source.arch.num_layers))):
        place(ctx.scratch / name, out.path / name)
    arch, layers = source.arch.to_json()
    out.describe(role="dense", arch=arch, layers=layers, facts={"dequantized": {"quant_method": method}})
