"""Linears walked in one launch have the bits of linears launched one by one, launch after launch, alone and in a graph."""

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import w4a16
from compress.kernels.linear.stream import gpu_of
from compress.kernels.linear.walk import Link, Walk, refusal
from compress.kernels.rows import RawRows
from compress.models.random_source import random_weight
from compress.quant.scheme import SCHEMES

pytestmark = pytest.mark.gpu
SHAPES = {"llama-3.1-8b": (4096, 14336, 6144), "small": (1024, 2048, 1536), "narrow": (128, 256, 384)}


def link(n: int, k: int, *, scheme: str, seed: int, gated: bool = False, norm: bool = False, biased: bool = False) -> Link:
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(seed)
    weight = random_weight((n, k), SCHEMES[scheme], dtype=torch.bfloat16, generator=generator)
    packed = w4a16.repack([weight], dtype=torch.bfloat16, device=device, gated=gated)

    def vector(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, device=device, generator=generator)).bfloat16()

    return Link(packed, vector(n) if biased else None, vector(k) if norm else None)


def make_walk(hidden_size: int, ffn_size: int, qkv_size: int, *, scheme: str, last: bool, biased: bool) -> Walk:
    o = link(hidden_size, hidden_size, scheme=scheme, seed=1, biased=biased)
    gate_up = link(2 * ffn_size, hidden_size, scheme=scheme, seed=2, gated=True, norm=True, biased=biased)
    down = link(hidden_size, ffn_size, scheme=scheme, seed=3, biased=biased)
    following = None if last else link(qkv_size, hidden_size, scheme=scheme, seed=4, norm=True, biased=biased)
    return Walk(o, gate_up, down, following, "silu", 1e-5, torch.zeros(2, dtype=torch.int32, device="cuda"))


def one_by_one(walk: Walk, x_TI: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    def linear(each: Link, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        rows = x if each.norm_weight_K is None else RawRows(x, each.norm_weight_K, walk.eps)
        return w4a16.linear(rows, each.packed, each.bias_O, activation=activation, residual_TO=residual)

    middle = linear(walk.o, x_TI, residual=hidden_TD)
    hidden = linear(walk.down, linear(walk.gate_up, middle, "silu"), residual=middle)
    return hidden, None if walk.following is None else linear(walk.following, hidden)


@pytest.mark.parametrize("scheme", ["W4A16_G128", "W4A16_G128_ASYM"])
@pytest.mark.parametrize(("last", "biased"), [(False, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_walked_linears_have_the_bits_of_linears_one_by_one(shape: str, scheme: str, last: bool, biased: bool) -> None:
    walk = make_walk(*SHAPES[shape], scheme=scheme, last=last, biased=biased)
    hidden_size = SHAPES[shape][0]
    for rows in (1, 2, 3, 4):
        assert refusal(walk, rows, gpu_of(torch.device("cuda", 0))) is None
        x, hidden = (torch.randn(rows, hidden_size, device="cuda").bfloat16() for _ in range(2))
        expected = one_by_one(walk, x, hidden)
        for _ in range(5):
            for walked, alone in zip(walk(x, hidden), expected, strict=True):
                assert (walked is None) == (alone is None)
                assert walked is None or alone is None or torch.equal(walked, alone)
            assert walk.counters.tolist() == [0, 0]


def test_a_graph_of_walks_gives_the_same() -> None:
    walk = make_walk(*SHAPES["small"], scheme="W4A16_G128", last=False, biased=False)
    x, hidden = (torch.randn(2, 1024, device="cuda").bfloat16() for _ in range(2))

    def chain(state: Tensor) -> Tensor:
        for _ in range(6):
            state, _ = walk(x, state)
        return state

    expected = chain(hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(hidden)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
