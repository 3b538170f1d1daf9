"""The recurrence of a gated delta net: its chunks against the definition, one row after another, and the
state that a cached decode keeps."""

import pytest
import torch
from torch import Tensor

from compress.models.attention import CachedAttention, FullAttention
from compress.models.decoder import Decoder
from compress.models.delta_net import CHANNEL_CHUNK, CHUNK, DeltaNet, gated_delta_rule, of_length_one
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
@pytest.mark.parametrize("rank", [0, 6])
def test_a_cached_decode_goes_on_where_it_ended(kernel_size: int, rank: int) -> None:
    delta = DeltaNet(4, 4 if rank else 2, 8, 12, kernel_size, rank)
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
