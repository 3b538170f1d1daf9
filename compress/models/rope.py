"""Rotary position embeddings (arXiv 2104.09864): frequencies of every supported kind, and their application.

Head dimension c is rotated with its partner c + C/2 by the angle position * inv_freq[c] ("rotate half"
layout). Checkpoints with neighbours as partners, and those that rotate a part of each head, are brought to
this layout on import (`layout.py`): dimensions that do not rotate have frequency zero. In heads wider than a
block of rows that share scales, the part of the dimensions that rotates stays first (`Rope.leading`);
`in_halves` brings them to this layout before each rotation. Angles, cosines and sines are float32 and are
cast to the activation dtype at the end, as `transformers` does.

LongRoPE has other frequencies for long sequences. `transformers` chooses by the longest position of a call,
so that cached keys change their meaning when a sequence grows past the limit; the serving runtime chooses
once, by the longest sequence that it was started for. Dynamic NTK is not offered.

Shapes: C head dimension, S sequence, B batch, H heads.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.layer_shape import Rope


def inverse_frequencies(
    rope: Rope | None, head_dim: int, device: torch.device | None = None, *, is_long: bool = False
) -> Tensor:
    """Return float32 [C/2] radians per position; zeros without a rope. `is_long`: for sequences longer than
    a LongRoPE model was first trained for."""
    if rope is None:
        return torch.zeros(head_dim // 2, device=device)
    rotary_dim = rope.rotary_dim or head_dim
    span = head_dim if rope.kind == "proportional" else rotary_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / span
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind in ("linear", "proportional"):
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        plain = _llama3(rope, plain)
    elif rope.kind == "yarn":
        plain = _yarn(rope, plain, rotary_dim)
    elif rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors if is_long else rope.short_factors, device=device)
        plain = 1.0 / (factors * rope.theta**exponents)
    if rope.exponents:
        plain = plain * torch.tensor(rope.exponents, dtype=torch.float32, device=device).exp()
    return F.pad(plain, (0, (head_dim - rotary_dim) // 2))


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide long wavelengths by `factor`, keep short ones, interpolate between (Llama 3.1 model card)."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position / wavelengths
    if rope.low_freq_factor == rope.high_freq_factor:  # Llama 4 has nothing between
        return torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(turns < rope.low_freq_factor, plain / rope.factor, plain)
    middle = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(middle, between, scaled)


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Scale frequencies by parts (NTK by parts, arXiv 2309.00071, section 3.2): a linear ramp between
    dimensions that turn beta_fast and beta_slow times."""

    def dimension(turns: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device=plain.device) - low) / max(
        high - low, 0.001
    )
    interpolated_frac = ramp.clamp(0, 1)
    return plain / rope.factor * interpolated_frac + plain * (1 - interpolated_frac)


def cos_sin(
    rope: Rope | None, head_dim: int, positions: Tensor, dtype: torch.dtype, *, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of shape [*positions.shape, C] for integer positions.

    `length` is that of the longest sequence, by default up to the largest position; only LongRoPE reads it.
    """
    is_long = False
    if rope is not None and rope.kind == "longrope":
        longest = int(positions.max()) + 1 if length is None else length
        is_long = longest > rope.original_max_position
    frequencies = inverse_frequencies(rope, head_dim, positions.device, is_long=is_long)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos = angles.cos()
    sin = angles.sin()
    if rope is not None and rope.attention_factor != 1:
        num_rotated = (rope.rotary_dim or head_dim) // 2
        cos = torch.cat((cos[..., :num_rotated] * rope.attention_factor, cos[..., num_rotated:]), dim=-1)
        sin = sin * rope.attention_factor
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((sin, sin), dim=-1).to(dtype)


def in_halves(x: Tensor, leading_dim: int) -> Tensor:
    """Return heads [..., C] in the order that `rotate` reads, of those whose first `leading_dim` dimensions
    turn half with half, and whose others do not turn; 0 for heads that are in that order."""
    if not leading_dim:
        return x
    first, second = x[..., :leading_dim].chunk(2, dim=-1)
    still_dim = (x.shape[-1] - leading_dim) // 2
    still = x[..., leading_dim:].split([still_dim, still_dim], dim=-1)
    return torch.cat((first, still[0], second, still[1]), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [..., S, H, C] by cos, sin [..., S, C]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-2)
