"""The training of `recover`, from prepared text to trained layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.distill.activation_parameters import train_activations_, trained_activations
from compress.distill.codes import CodesLinear, Levels, LevelsLora, start_towards_source_, trained_layer
from compress.distill.learn import Curve
from compress.distill.norm_weights import train_norms_, trained_norms
from compress.distill.objective import Teacher
from compress.distill.quantized_student import MakeLinear, outer_decoder, quantized_student
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.decoder import Decoder
from compress.models.family import family_of_arch
from compress.models.layer_shape import XIELU
from compress.models.weights import Weights, WeightSource, build_decoder
from compress.quant.scheme import QuantizedWeight
from compress.stages.distill.text import TrainingText
from compress.stages.distill.training import learn_from
from compress.stages.recover.spec import Recover


@dataclass(frozen=True)
class Recovered:
    """A trained model over the codes that it started from, with its curve; the same on every rank."""

    quantized: WeightSource
    student: Decoder
    curve: Curve
    teacher_bits_per_byte: float

    @property
    def measured(self) -> Curve:
        """The rows of the curve that were measured on held-out text."""
        return [row for row in self.curve if "kl" in row]

    @property
    def keeps(self) -> bool:
        """Whether training lowered the KL on held-out text; if not, the codes stay as they were."""
        return bool(self.measured[-1]["kl"] < self.measured[0]["kl"])

    def outer(self) -> Weights:
        """Return the weights outside of the layers, the last norm trained."""
        weights = self.quantized.outer()
        return {**weights, **self._beside_codes(self.student, weights)} if self.keeps else weights

    def layer(self, layer_idx: int) -> Weights:
        """Return the weights of a layer with its trained codes, scales, norms and parameters of
        activations."""
        weights = self.quantized.layer(layer_idx)
        if not self.keeps:
            return weights
        trained = trained_layer(self.student, layer_idx, weights)
        return {**trained, **self._beside_codes(self.student.layers[layer_idx], weights)}

    def write(self, out: ArtifactWriter) -> None:
        """Write the weights of the result."""
        save_weights(out.path / OUTER_NAME, self.outer())
        for idx in range(self.quantized.arch.num_layers):
            save_weights(out.path / layer_name(idx), self.layer(idx))

    @staticmethod
    def _beside_codes(module: nn.Module, weights: Weights) -> dict[str, Tensor]:
        """Return the trained norms and parameters of activations of a module that are among its weights."""
        trained = {**trained_norms(module), **trained_activations(module)}
        return {name: each.cpu() for name, each in trained.items() if name in weights}


def trained_linears(spec: Recover, ctx: Context, *, device: torch.device) -> MakeLinear:
    """Return what makes the module that trains a quantized linear."""
    generator = ctx.rng("lora")

    def make_linear(weight: QuantizedWeight, bias_O: Tensor | None) -> nn.Module:
        levels: nn.Module
        if spec.lora is None:
            levels = Levels(weight, device=device)
        else:
            rank = spec.lora.rank
            alpha = spec.lora.alpha or 2.0 * rank
            levels = LevelsLora(weight, rank=rank, alpha=alpha, generator=generator, device=device)
        return CodesLinear(weight, bias_O, levels=levels, scale_pace=spec.scale_pace, device=device)

    return make_linear


def train_codes(
    spec: Recover,
    source: WeightSource,
    quantized: WeightSource,
    text: TrainingText,
    ctx: Context,
    *,
    digest: str,
) -> Recovered:
    """Train codes, scales, norms and parameters of activations of a quantized model against the source of
    that digest, on all ranks. Rank 0 writes the training state.

    Raises:
        UsageError: too little text, or a loss that is not finite.
        Interrupted: the run was asked to stop; the same call goes on from there.
    """
    device = torch.device(ctx.device)
    dtype = spec.computes_in(device)
    teacher = Teacher(build_decoder(source, dtype=dtype, device=device), device=device, compile=spec.compile)
    student = quantized_student(
        outer_decoder(quantized, dtype=dtype, device=device),
        quantized.layer,
        trained_linears(spec, ctx, device=device),
        dtype=dtype,
        device=device,
    )
    start_towards_source_(student, source)
    if spec.scale_lr > 0:
        left = family_of_arch(source.arch).shared_norms
        train_norms_(student, pace=spec.scale_pace, left=left)
        train_activations_(student, pace=spec.scale_pace)
    config = spec.train_config(torch.float32)  # the modules compute in their own dtype
    curve, teacher_bits = learn_from(
        teacher, student, spec, config, text, ctx, digest=digest, early_stop=spec.early_stop
    )
    return Recovered(quantized, student, curve, teacher_bits)


def recovery_facts(spec: Recover, recovered: Recovered, teacher: Mapping[str, str]) -> dict[str, Any]:
    """Return facts of the result: what was trained, the teacher, and the student before and after."""
    first = recovered.measured[0]
    last = recovered.measured[-1]
    return {
        "trained": _trained(spec, recovered.quantized.arch),
        "teacher": {**teacher, "bits_per_byte": recovered.teacher_bits_per_byte},
        "student": {"params": recovered.quantized.arch.num_params},
        "stopped_early": last["step"] < spec.num_steps,
        "kept": recovered.keeps,
        "before": {key: first[key] for key in ("kl", "bits_per_byte")},
        "after": {key: last[key] for key in ("kl", "bits_per_byte")},
        "scale_lr": spec.scale_lr,
    }


def _trained(spec: Recover, arch: Arch) -> str:
    levels = "Codes" if spec.lora is None else f"A LoRA of rank {spec.lora.rank}"
    if spec.scale_lr == 0:
        return levels
    has_parameters = arch.activation == XIELU
    return f"{levels}, scales, norms and activations" if has_parameters else f"{levels}, scales and norms"
