"""The estimate of a recovery for `compress plan`, from shapes alone: that of a distillation
(`distill/estimate.py`) whose student has codes.

memory       a trained weight: float32 master, gradient and two moments, and what the forward pass multiplies
             with, which the backward pass reads again (LoRA: a byte of levels and that product)
disk         codes, scales and what is outside of the layers; the training tokens; while it runs, the state
"""

from dataclasses import replace

from compress.data.model_tokens import check_seq_len
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import itemsize_of
from compress.quant.model_scheme import ModelScheme
from compress.stages import Estimate, PlanFacts
from compress.stages.distill.estimate import check_text, lora_params, training_estimate
from compress.stages.quantize.schemes import most_linear_bytes, outer_bytes, possible_schemes
from compress.stages.quantize.spec import Quantize
from compress.stages.recover.spec import Recover


def estimate(spec: Recover, facts: PlanFacts) -> Estimate:
    """Return what one rank needs.

    Raises:
        UsageError: the quantization rounds no weight, or a LoRA's rank is above that of a linear.
    """
    quantize = facts.specs["quantize"]
    assert isinstance(quantize, Quantize)
    check_text(spec, facts, "recover")
    arch = facts.arch
    check_seq_len(spec.seq_len, "recover: seq_len", arch)
    schemes = [each for each in possible_schemes(quantize, arch) if each is not None]
    if not schemes:
        raise UsageError(
            "recover: `quantize` keeps every weight in 16 bits, so there are no codes to train. Leave out "
            "`recover`."
        )
    if spec.lora is not None:
        spec.lora.check_rank(
            arch,
            "recover",
            is_trained=lambda name: any(each.for_linear(name) is not None for each in schemes),
        )
    most = max(_quantized_params(arch, each) for each in schemes)
    width = 4 if facts.device == "cpu" else 2
    num_trained = most if spec.lora is None else lora_params(arch, spec.lora.rank)
    levels = 0 if spec.lora is None else most
    frozen = levels + width * (arch.num_params - most) + width * most
    found = training_estimate(
        spec, arch, facts.source_arch or arch, facts, num_trained=num_trained, frozen_bytes=frozen
    )
    written = most_linear_bytes(quantize, arch) + outer_bytes(arch, quantize.head_scheme)
    disk = found.disk_bytes - itemsize_of(arch) * arch.num_params + written
    return replace(found, disk_bytes=disk, notes=tuple(_notes(spec, most)))


def _quantized_params(arch: Arch, scheme: ModelScheme) -> int:
    """Return the number of weights of layers that have codes."""
    total = 0
    for idx, layer in enumerate(arch.layers):
        for name in layer.linears:
            if scheme.for_linear(f"layers.{idx}.{name}") is not None:
                rows, columns = layer.linear_shape(name, arch.hidden_size)
                total += rows * columns
    return total


def _notes(spec: Recover, num_codes: int) -> list[str]:
    trained = "all of them" if spec.lora is None else f"LoRA of rank {spec.lora.rank}"
    return [
        f"{num_codes / 1e6:,.1f} M codes learn from the source ({trained}, {spec.loss.kind}), {spec.extent}",
        f"{spec.data}: {spec.num_windows:,} windows of {spec.seq_len}, {spec.eval_samples} held out",
    ]
