"""Rotary position embeddings (arXiv 2104.09864): frequencies of every supported kind, and their application.

Head dimension c is rotated with its partner c + C/2 by the angle position * inv_freq[c] ("rotate half"
layout, as in every family here). Angles, cosines and sines are float32 and are cast to the activation
dtype at the end, as `transformers` does. No scaling that depends on the length of the running sequence
(dynamic NTK, LongRoPE) is offered: a cached key would change with later tokens.

Shapes: C head dimension, S sequence, B batch, H heads.
"""

import math

import torch
from torch import Tensor

from compress.models.arch import Rope


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Return float32 [C/2] radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide long wavelengths by `factor`, keep short ones, interpolate between (Llama 3.1 model card)."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position / wavelengths
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


def cos_sin(rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of shape [*positions.shape, C] for integer positions."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies(rope, head_dim, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * rope.attention_factor).to(dtype), (angles.sin() * rope.attention_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [..., S, H, C] by cos, sin [..., S, C]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-2)
