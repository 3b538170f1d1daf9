"""Heads whose pairs turn by the negative angle on disk, as those of nanochat do."""

from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.layer_shape import LayerShape, Rope
from compress.models.layout import row_order
from compress.models.rope import cos_sin, rotate

CONFIG: dict[str, Any] = {
    "model_type": "nanochat",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    "rope", [Rope(100.0), Rope(100.0, rotary_dim=8), Rope(100.0, rotary_dim=8, leading=True)]
)
def test_heads_in_the_canonical_order_turn_back_as_those_on_disk(rope: Rope) -> None:
    shape = LayerShape(num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=8, rope=rope)
    plain = row_order(shape, "attn.q", 32, interleaved=False)
    swapped = row_order(shape, "attn.q", 32, interleaved=False, turned_back=True)
    assert swapped is not None
    stored_T32 = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)

    def turned(order: torch.Tensor, sign: int) -> torch.Tensor:
        """Return heads in an order, rotated, and in the order on disk again."""
        heads = stored_T32[:, order].view(5, 2, 16)
        halves = heads
        if rope.leading:
            first, still = heads[..., :8].chunk(2, dim=-1), heads[..., 8:].chunk(2, dim=-1)
            halves = torch.cat((first[0], still[0], first[1], still[1]), dim=-1)
        cos, sin = cos_sin(rope, 16, positions, torch.float32)
        found = rotate(halves, cos, sign * sin)
        if rope.leading:
            parts = found.chunk(4, dim=-1)
            found = torch.cat((parts[0], parts[2], parts[1], parts[3]), dim=-1)
        return found.reshape(5, 32)[:, torch.argsort(order)]

    ours = turned(swapped, 1)
    theirs = turned(torch.arange(32) if plain is None else plain, -1)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours[1:], turned(swapped, -1)[1:])


def test_no_block_of_rows_that_share_a_scale_is_cut() -> None:
    shape = LayerShape(num_heads=1, num_kv_heads=1, head_dim=256, intermediate_size=8, rope=Rope(100.0))
    order = row_order(shape, "attn.k", 256, interleaved=False, turned_back=True)
    assert order is not None
    assert torch.equal(order, torch.cat((torch.arange(128, 256), torch.arange(128))))


def test_facts_of_nanochat() -> None:
    arch = arch_of()
    assert all((arch.unit_norms, arch.unit_qk_norm, arch.embed_norm))
    assert (arch.activation, arch.logit_softcap) == ("relu2", 15.0)
    assert arch_of(final_logit_softcapping=None).logit_softcap is None
    assert Arch.from_json(*arch.to_json()) == arch


def test_a_factor_of_what_turns_is_refused_because_a_norm_follows() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    with pytest.raises(UnsupportedArch, match="rope_type"):
        arch_of(rope_parameters=rope)
