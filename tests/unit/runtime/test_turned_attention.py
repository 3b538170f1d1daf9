"""Where a kernel of decode attention turns heads itself, the runner gives it the rows of the projection, and
serves the same bits as with two launches. The kernel here is put together from the references."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.turn import Turn
from compress.kernels.problem import Problem
from compress.kernels.rope_store.reference import rope_store
from compress.kernels.select import Kernel, select
from compress.runtime import layer_runner
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
TURNED: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed heads in a window": {"qk_norm": True, "layers": (tiny_shape(window=5), tiny_shape())},
    "normed heads with an offset": {"qk_norm": True, "norm_offset": 1.0},
    "no positions": {"layers": (tiny_shape(), tiny_shape(rope=None))},
}
NOT_TURNED: dict[str, dict[str, Any]] = {
    "growing queries": {"query_growth": (0.1, 16)},
    "norms over all heads": {"qk_norm": True, "whole_qk_norm": True},
    "centered heads": {"qk_norm": True, "norm": "layer"},
    "normed values": {"v_norm": True},
    "values that are keys": {"layers": (tiny_shape(keys_are_values=True),)},
}


def with_turns(kernel: Kernel, counts: dict[bool, int]) -> Kernel:
    """Return the kernel with heads turned before it, where it is given a turn; calls are counted by that."""

    def attend(
        rows: Tensor, kv: PagedKV, table_RB: Tensor, lens_R: Tensor, *, turn: Turn | None = None, **facts: Any
    ) -> Tensor:
        counts[turn is not None] += 1
        if turn is not None:
            q_len, block_size = facts["q_len"], kv.k.shape[2]
            num_heads = rows.shape[1] // kv.head_dim - 2 * kv.k.shape[0]
            positions_RQ = lens_R.unsqueeze(1) + torch.arange(-q_len, 0)
            slots_RQ = table_RB.gather(1, positions_RQ.div(block_size, rounding_mode="floor")) * block_size
            slots_RQ += positions_RQ % block_size
            positions_T = positions_RQ.flatten().clamp(max=len(turn.cos_PC) - 1)
            where = turn.cos_PC, turn.sin_PC, positions_T, slots_RQ.flatten(), kv
            rows = rope_store(rows, *where, num_heads=num_heads, qk_norm=turn.qk_norm, eps=turn.eps)
        attended: Tensor = kernel.fn(rows, kv, table_RB, lens_R, **facts)
        return attended

    return replace(kernel, fn=attend, turns=lambda problem, turn: turn.of_heads_alone)


def served(facts: dict[str, Any], speculative: bool) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their log probabilities of three requests, decoded together."""
    source = tiny_source(**facts)
    proposer = Speculative(DraftModel(source), k=3) if speculative else None
    engine = Engine(source, device=CPU, config=EngineConfig(speculative=proposer, max_model_len=64))
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(101, (length,), generator=generator).tolist()) for length in (1, 37, 55)]
    params = SamplingParams(9, ignore_eos=True, logprobs=True)
    done = engine.generate([Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)])
    return [(list(each.tokens), list(each.logprobs)) for each in done]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("name", [*TURNED, *NOT_TURNED])
def test_heads_turned_by_attention_give_the_same_bits(
    name: str, speculative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = TURNED.get(name) or NOT_TURNED.get(name) or {}
    apart = served(facts, speculative)
    counts = {False: 0, True: 0}

    def chosen(problem: Problem) -> Kernel:
        kernel = select(problem)
        return with_turns(kernel, counts) if problem.op == "attention_decode" else kernel

    monkeypatch.setattr(layer_runner, "select", chosen)
    assert served(facts, speculative) == apart
    assert counts[name in TURNED] > 0
    assert counts[name not in TURNED] == 0
