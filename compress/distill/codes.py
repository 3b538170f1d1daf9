"""Training of codes and scales, both at once, with the rounding in the forward pass: quantization-aware
training with straight-through gradients (arXiv 1308.3432; scales learned as in LSQ, arXiv 1902.08153).

A linear holds latent levels v, float32, and multiplies with what a consumer reads of the artifact:

    w = l(v) * s,   l(v) = code(v) - zero point, the nearest number of the scheme's grid,   s = s0 (1 + p r)

Training begins at the very model that a quantization method found. In the rounding interval of its code, v
starts `TOWARDS_SOURCE` of the way from the middle to the source's weight, so that weights between two codes
turn first, and all others have about half a step to cross before noise in the gradients changes them. r
starts at 0; p is the learning rate of scales over that of levels, so that the loop has one rate.
Scales are rounded to the stored dtype in the forward pass, too (and once more in the artifact if they are
below 2^-17, see `numerics.storable`). Those of one byte (NVFP4, MXFP4) stay: a
number of their grid next to theirs moves all weights of a group by a tenth, or to their double. Zero points
stay.

Gradients, with g = dL/dw and m the mean scale of the matrix:

    by v   g s / m     as if l(v) were v; zero where it would lead further out of the range of the codes
    by r   p s0 l g    summed over the scale group

The first is dL/dv up to the constant m, which keeps its size that of a gradient by weights, far above the
epsilon of AdamW. Units of v are steps of the grid (for e2m1 and e4m3, scales), so that one learning rate
fits all schemes, layers and models.

With `LevelsLora` the levels are l0 + (m / s) (alpha / rank) B A: the term is a matrix of that rank in the
units of the weights, it is merged before rounding, and l0 stays in a byte a weight.

Schemes that round inputs have theirs rounded here, too, with the gradient of the identity.

Shapes: O out, I in, R rows of scales, G scale groups, N members of a group, K rank.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.kernels.operands.rows import ActivationQuant, input_quant, quantize
from compress.models.decoder import Decoder
from compress.models.weights import Weights, WeightSource, dense
from compress.quant.numerics import grouped, nearest_codes, storable, ungrouped
from compress.quant.scheme import QuantizedWeight, Scheme

TOWARDS_SOURCE = 0.8
"""Latent levels start at this share of the way from the middle of their rounding interval to the weight of
the source, or to the interval's border if that comes first."""
FOREIGN = 0.55
"""Mean distance between codes and the source's weights, in steps, from which on they are not taken for the
same numbers: rounding to nearest gives 0.25, GPTQ up to 0.35, descent on top of it up to 0.5."""


class Levels(nn.Module):
    """Latent levels that are trained one by one."""

    def __init__(self, weight: QuantizedWeight, *, device: torch.device) -> None:
        super().__init__()
        self.latent_OI = nn.Parameter(levels_of(weight).to(device=device, dtype=torch.float32))

    def forward(self) -> Tensor:
        """Return the latent levels, float32 [O, I]."""
        return self.latent_OI


class LevelsLora(nn.Module):
    """Fixed levels and a low-rank term that is trained (arXiv 2106.09685)."""

    levels_OI: Tensor
    ratio_RG: Tensor

    def __init__(
        self,
        weight: QuantizedWeight,
        *,
        rank: int,
        alpha: float,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        super().__init__()
        num_rows, num_columns = weight.shape
        scale_RG = weight.scale_OG.to(device=device, dtype=torch.float32)
        a_KI = torch.randn(rank, num_columns, generator=generator) * num_columns**-0.5
        self.scheme = weight.scheme
        self.scale = alpha / rank
        self.register_buffer("levels_OI", levels_of(weight).to(device), persistent=False)
        self.register_buffer("ratio_RG", scale_RG.mean() / scale_RG, persistent=False)
        self.a_KI = nn.Parameter(a_KI.to(device))
        self.b_OK = nn.Parameter(torch.zeros(num_rows, rank, device=device))

    def forward(self) -> Tensor:
        """Return the latent levels, float32 [O, I]."""
        term_RGN = grouped(self.scale * (self.b_OK @ self.a_KI), self.scheme) * self.ratio_RG.unsqueeze(-1)
        return self.levels_OI.to(torch.float32) + ungrouped(term_RGN, self.scheme, self.levels_OI.shape)


class CodesLinear(nn.Module):
    """A linear whose codes and scales are trained.

    `levels` returns its latent levels; `scale_pace` is the learning rate of relative changes of scales over
    that of levels. The change of the scales is a vector, so that Muon leaves it to AdamW.
    """

    before_RG: Tensor
    mean_scale: Tensor
    zero_RG: Tensor | None
    bias_O: Tensor | None
    change: nn.Parameter | None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias_O: Tensor | None,
        *,
        levels: nn.Module,
        scale_pace: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        zero_RG = weight.zero_point_OG
        self.shape = weight.shape
        self.scheme = weight.scheme
        self.stored_dtype = weight.scale_OG.dtype
        self.levels = levels
        self.scale_pace = scale_pace
        self.input_quant = input_quant([weight], device)
        buffers = {
            "before_RG": weight.scale_OG.to(device=device, dtype=torch.float32),
            "mean_scale": weight.scale_OG.to(device=device, dtype=torch.float32).mean(),
            "zero_RG": None if zero_RG is None else zero_RG.to(device=device, dtype=torch.float32),
            "bias_O": bias_O,
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)
        learns = weight.scheme.scale_type is None and scale_pace > 0
        zeros = torch.zeros(weight.scale_OG.numel(), device=device)
        self.register_parameter("change", nn.Parameter(zeros) if learns else None)

    def scale(self) -> Tensor:
        """Return the scales before they are rounded to the stored dtype, float32 [R, G]."""
        if self.change is None:
            return self.before_RG
        return self.before_RG * (1 + self.scale_pace * self.change.view(self.before_RG.shape))

    def forward(self, x: Tensor) -> Tensor:
        w_OI = _Dequantized.apply(  # type: ignore[no-untyped-call]
            self.levels(),
            self.scale(),
            self.zero_RG,
            self.mean_scale,
            self.scheme,
            self.stored_dtype,
            x.dtype,
        )
        if self.input_quant is not None:
            x = _rounded(x, self.input_quant)
        return F.linear(x, w_OI, self.bias_O)

    @torch.no_grad()
    def start_towards_(self, w_OI: Tensor) -> None:
        """Move latent levels that are trained one by one towards dense weights [O, I] without a changed code.
        All stay if the codes encode other numbers, as AWQ's scales of columns make them."""
        if not isinstance(self.levels, Levels):
            return
        latent_OI = self.levels.latent_OI
        levels_RGN = _levels(latent_OI, self.scheme, self.zero_RG)
        w_RGN = grouped(w_OI.to(latent_OI), self.scheme)
        steps_RGN = w_RGN / self.before_RG.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        away_RGN = (steps_RGN - levels_RGN).clamp(-2, 2)
        if not float(away_RGN.abs().mean()) < FOREIGN:
            return
        moved_RGN = levels_RGN + TOWARDS_SOURCE * away_RGN.clamp(-0.5, 0.5)
        moved_OI = ungrouped(moved_RGN, self.scheme, latent_OI.shape)
        stays_RGN = _levels(moved_OI, self.scheme, self.zero_RG) == levels_RGN
        stays_OI = ungrouped(stays_RGN, self.scheme, latent_OI.shape)
        latent_OI.copy_(torch.where(stays_OI, moved_OI, latent_OI))

    @torch.no_grad()
    def quantized(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the weight that was trained, on the device of the original, with the original's scale
        where training has driven one to zero."""
        place = weight.codes_OI.device
        codes_RGN = _codes(self.levels(), self.scheme, self.zero_RG)
        codes_OI = ungrouped(codes_RGN, self.scheme, weight.codes_OI.shape).to(self.scheme.code_dtype)
        scale_RG = weight.scale_OG
        if self.change is not None:
            trained_RG = storable(self.scale(), self.scheme, self.stored_dtype).to(place)
            scale_RG = torch.where(trained_RG > 0, trained_RG, scale_RG)
        return replace(weight, codes_OI=codes_OI.to(place), scale_OG=scale_RG)


class _Dequantized(torch.autograd.Function):
    """The weights [O, I] that consumers compute from the rounded levels and scales, in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        latent_OI: Tensor,
        scale_RG: Tensor,
        zero_RG: Tensor | None,
        mean_scale: Tensor,
        scheme: Scheme,
        stored_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> Tensor:
        scale_RG = scale_RG.to(stored_dtype).to(torch.float32)
        ctx.save_for_backward(latent_OI, scale_RG, zero_RG, mean_scale)
        ctx.scheme = scheme
        w_RGN = _levels(latent_OI, scheme, zero_RG) * scale_RG.unsqueeze(-1)
        stored_OI = ungrouped(w_RGN, scheme, latent_OI.shape).to(stored_dtype)
        # a copy in any case: where the result is another name of a tensor, torch 2.11 compiles no gradient
        return stored_OI.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        latent_OI, scale_RG, zero_RG, mean_scale = ctx.saved_tensors
        scheme: Scheme = ctx.scheme
        g_RGN = grouped(grad_outputs[0].to(torch.float32), scheme)
        of_scale_RG = (g_RGN * _levels(latent_OI, scheme, zero_RG)).sum(dim=-1)
        v_RGN = grouped(latent_OI, scheme)
        v_RGN = v_RGN if zero_RG is None else v_RGN + zero_RG.unsqueeze(-1)
        beyond_RGN = v_RGN - v_RGN.clamp(scheme.min_code, scheme.max_code)
        leads_out = beyond_RGN * g_RGN < 0  # descent would add to what is beyond
        of_latent_RGN = (g_RGN * (scale_RG / mean_scale).unsqueeze(-1)).masked_fill_(leads_out, 0.0)
        of_latent_OI = ungrouped(of_latent_RGN, scheme, latent_OI.shape)
        return of_latent_OI, of_scale_RG, None, None, None, None, None


def _codes(latent_OI: Tensor, scheme: Scheme, zero_RG: Tensor | None) -> Tensor:
    """Return the nearest codes of latent levels as float32 [R, G, N]."""
    zero = None if zero_RG is None else zero_RG.unsqueeze(-1)
    return nearest_codes(grouped(latent_OI, scheme), scheme, latent_OI.new_ones(()), zero)


def _levels(latent_OI: Tensor, scheme: Scheme, zero_RG: Tensor | None) -> Tensor:
    codes_RGN = _codes(latent_OI, scheme, zero_RG)
    return codes_RGN if zero_RG is None else codes_RGN - zero_RG.unsqueeze(-1)


def levels_of(weight: QuantizedWeight) -> Tensor:
    """Return codes less zero points [O, I], in the codes' dtype, or in int16 for 8 bits with zero points."""
    if weight.zero_point_OG is None:
        return weight.codes_OI
    members = weight.shape[1] // weight.zero_point_OG.shape[1]
    levels_OI = weight.codes_OI.to(torch.int16) - weight.zero_point_OG.to(torch.int16).repeat_interleave(
        members, dim=1
    )
    return levels_OI.to(torch.int8) if weight.scheme.num_bits < 8 else levels_OI


def start_towards_source_(student: Decoder, source: WeightSource) -> None:
    """Move the latent levels of a student towards the weights of its source. A linear of another shape, as
    after pruning, stays as it is."""
    for idx, layer in enumerate(student.layers):
        weights = source.layer(idx)
        for name, module in layer.named_modules():
            weight = weights.get(f"{name}.weight")
            if isinstance(module, CodesLinear) and weight is not None and weight.shape == module.shape:
                module.start_towards_(dense(weight))


def _rounded(x: Tensor, quant: ActivationQuant) -> Tensor:
    """Return inputs [..., I] as the linear reads them, with the gradient of the identity."""
    with torch.no_grad():
        moved = quantize(x.flatten(0, -2), quant).dequantize(x.dtype).view(x.shape) - x
    return x + moved


def trained_layer(student: Decoder, layer_idx: int, weights: Weights) -> dict[str, Tensor | QuantizedWeight]:
    """Return the original layer with its trained codes and scales."""
    trained = dict(weights)
    for name, module in student.layers[layer_idx].named_modules():
        weight = weights.get(f"{name}.weight")
        if isinstance(module, CodesLinear) and isinstance(weight, QuantizedWeight):
            trained[f"{name}.weight"] = module.quantized(weight)
    return trained
