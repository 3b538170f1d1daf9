"""The recurrence of a gated delta net: its chunks against the definition, one row after another, and the
state that a cached decode keeps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import StorageError
from compress.models.attention import CachedAttention, FullAttention
from compress.models.decoder import Decoder
from compress.models.delta_net import (
    CHANNEL_CHUNK,
    CHUNK,
    DeltaNet,
    gated_delta_rule,
    log_decays,
    of_length_one,
)
from compress.untrusted.fields import Fields
from tests.support.tiny_source import tiny_shape, tiny_source


def operands(length: int, *channels: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator)

    q, k = (of_length_one(randn(8)) for _ in range(2))
    return q, k, randn(5), -randn(*channels).exp(), torch.sigmoid(randn())


@pytest.mark.parametrize("channels", [(), (8,)], ids=["decays of heads", "of channels"])
@pytest.mark.parametrize("length", [1, 7, CHANNEL_CHUNK + 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_chunks_are_the_recurrence(length: int, channels: tuple[int, ...]) -> None:
    q, k, v, log_decay, beta = (each.double() for each in operands(length, *channels))
    state = torch.zeros(2, 3, 8, 5, dtype=torch.float64)
    expected = []
    for t in range(length):
        state = state * log_decay[:, t].reshape(2, 3, -1, 1).exp()
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        expected.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    out, last = gated_delta_rule(*operands(length, *channels))
    torch.testing.assert_close(out.double(), torch.stack(expected, dim=1), rtol=0, atol=2e-5)
    torch.testing.assert_close(last.double(), state, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize(
    "facts",
    [
        {"num_key_heads": 2},
        {"num_key_heads": 4, "rank": 6, "by_channel": True},
        {"num_key_heads": 4, "by_channel": True, "decay_bound": 2.0},
    ],
    ids=["decays of heads", "of channels by latents", "of channels with a bound"],
)
def test_a_cached_decode_goes_on_where_it_ended(kernel_size: int, facts: dict[str, Any]) -> None:
    delta = DeltaNet(num_heads=4, key_dim=8, value_dim=12, kernel_size=kernel_size, **facts)
    arch = tiny_source(layers=(tiny_shape(recurrence=delta, rope=None), tiny_shape())).arch
    torch.manual_seed(0)
    decoder = Decoder(arch).requires_grad_(False)
    tokens_BS = torch.randint(arch.vocab_size, (2, 12))
    whole = decoder(tokens_BS, attention=FullAttention())
    cache = CachedAttention()
    cuts = (0, 1, 2, 7, 8, 12)
    pieces = [
        decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_bound_of_decays_is_met_by_none_and_neared_by_large_inputs(by_channel: bool) -> None:
    """Each log of a decay is between the negative of the bound and zero, and follows its input alone."""
    delta = DeltaNet(3, 3, 8, 12, 4, by_channel=by_channel, decay_bound=2.5)
    generator = torch.Generator().manual_seed(0)
    decay, dt_bias = (torch.randn(5, delta.num_decays, generator=generator) for _ in range(2))
    rate = -torch.rand(3, generator=generator).exp()
    found = log_decays(delta, decay, dt_bias[0], rate)
    assert found.shape == (5, 3, 8 if by_channel else 1)
    assert bool(((found > -2.5) & (found < 0)).all())
    assert bool((log_decays(delta, decay + 40, dt_bias[0], rate) == -2.5).all())
    assert bool((log_decays(delta, decay - 40, dt_bias[0], rate) > -1e-6).all())
    row = (decay[2] + dt_bias[0]).unflatten(0, (3, -1))[1, 0]
    assert found[2, 1, 0] == pytest.approx(-2.5 / (1 + math.exp(float(rate[1] * row))), rel=1e-5)


def test_an_older_manifest_with_latents_has_decays_of_channels() -> None:
    widths = {"num_heads": 4, "num_key_heads": 4, "key_dim": 8, "value_dim": 12, "kernel_size": 4}
    older = DeltaNet.from_json(Fields({**widths, "rank": 6}, "a manifest", StorageError))
    assert older == DeltaNet(4, 4, 8, 12, 4, rank=6, by_channel=True)
    assert not DeltaNet.from_json(Fields(widths, "a manifest", StorageError)).by_channel


def test_latents_are_for_decays_of_channels() -> None:
    assert "latents of 6 numbers" in str(DeltaNet(4, 4, 8, 12, 4, rank=6).why_unfit())
    assert DeltaNet(4, 4, 8, 12, 4, rank=6, by_channel=True).why_unfit() is None
