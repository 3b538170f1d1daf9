"""Heads that rotate in part and are wider than a block of rows that share scales: their rows keep the order
of the checkpoint, and manifests state so."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.errors import StorageError, UnsupportedArch, UnsupportedFormat
from compress.export.refusals import check_rules
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.latent import Latent
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import LayerShape, Rope
from compress.models.layout import row_order
from compress.models.rope import cos_sin, in_halves, rotate
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_hf import build_config
from tests.support.tiny_source import tiny_shape, tiny_source

LEADING = Rope(1e4, rotary_dim=8, leading=True)


def arch_of(family: str, head_dim: int, rotated_frac: float) -> Arch:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": rotated_frac}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128, "intermediate_size": 256}
    sizes |= {"full_attention_interval": 2} if family.startswith("qwen") else {}
    config = build_config(family, {**sizes, "head_dim": head_dim, "rope_parameters": rope}).to_dict()
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("family", "head_dim", "rotated_frac", "leading_dim"),
    [
        ("qwen3_5_text", 256, 0.25, 64),
        ("qwen3_5_text", 136, 0.5, 68),
        ("qwen3_5_text", 256, 1.0, 0),
        ("qwen3_5_text", 128, 0.25, 0),
        ("qwen3_next", 256, 0.25, 64),
        ("glm4", 256, 0.25, 64),
        ("glm4", 128, 0.5, 0),
        ("llama", 256, 1.0, 0),
    ],
)
def test_dimensions_that_rotate_lead_heads_above_a_block(
    family: str, head_dim: int, rotated_frac: float, leading_dim: int
) -> None:
    arch = arch_of(family, head_dim, rotated_frac)
    layer = next(each for each in reversed(arch.layers) if each.recurrence is None)
    assert layer.leading_dim == leading_dim
    order = row_order(layer, "attn.q", 2 * head_dim, interleaved=family == "glm4")
    if family != "glm4":
        assert (order is None) == (bool(leading_dim) or rotated_frac == 1)
    elif leading_dim:
        assert order is not None
        assert torch.equal(order[leading_dim:head_dim], torch.arange(leading_dim, head_dim))


def test_leading_dimensions_turn_half_with_half_and_the_others_stay() -> None:
    """Compare with the rotation as `transformers` writes it."""
    x_SHC = torch.randn(7, 3, 24, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7)
    ours = rotate(in_halves(x_SHC, 8), *cos_sin(LEADING, 24, positions, torch.float32))
    tables = cos_sin(Rope(1e4), 8, positions, torch.float32)
    theirs = torch.cat((rotate(x_SHC[..., :8], *tables), x_SHC[..., 8:]), dim=-1)
    assert torch.equal(ours, in_halves(theirs, 8))


def test_a_manifest_states_leading_dimensions_and_one_without_them_keeps_its_meaning() -> None:
    by_halves = tiny_shape(rope=replace(LEADING, leading=False))
    arch = tiny_source(layers=(tiny_shape(rope=LEADING), by_halves)).arch
    facts, layers = json.loads(json.dumps(arch.to_json()))
    assert layers[0]["rope"]["leading"] is True
    assert "leading" not in layers[1]["rope"]
    assert Arch.from_json(facts, layers) == arch
    assert row_order(arch.layers[0], "attn.k", 32, interleaved=False) is None
    order = row_order(arch.layers[1], "attn.k", 16, interleaved=False)
    assert order is not None
    assert order.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leading": 1}, "leading"),
        ({"rotary_dim": 0}, "lead its heads.*rotary_dim 0"),
        ({"rotary_dim": 7}, "rotates 7 of the 16"),
        ({"rotary_dim": 18}, "rotates 18 of the 16"),
        ({"kind": "proportional"}, "lead its heads.*'proportional'"),
    ],
)
def test_a_manifest_of_leading_dimensions_that_cannot_be_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    facts, layers = tiny_source(layers=(tiny_shape(rope=LEADING),)).arch.to_json()
    layers[0]["rope"] |= changes
    with pytest.raises((UnsupportedArch, StorageError), match=message):
        Arch.from_json(facts, layers)


def test_leading_dimensions_are_not_those_of_latents_nor_of_heads_normed_after_the_rotation() -> None:
    latent = Latent(q_rank=0, kv_rank=12, rope_dim=8, value_dim=12, interleaved=False)
    shape: LayerShape = tiny_shape(num_kv_heads=4, rope=LEADING, latent=latent)
    assert "without latents" in (why_layer_unfit(shape) or "")
    with pytest.raises(UnsupportedArch, match="follow the rotation"):
        tiny_source(layers=(tiny_shape(rope=LEADING),), qk_norm=True, rotates_first=True)


@pytest.mark.parametrize(("rotated_frac", "fits"), [(0.25, True), (0.5, True), (0.75, False)])
def test_neighbours_that_rotate_have_blocks_on_disk_where_all_of_them_lie_in_one(
    rotated_frac: float, fits: bool
) -> None:
    arch = arch_of("glm4", 256, rotated_frac)
    blocks = ModelScheme(SCHEMES["FP8_BLOCK"])
    if fits:
        check_rules("fp8", arch, blocks)
    else:
        with pytest.raises(UnsupportedFormat, match="whole-blocks-on-disk"):
            check_rules("fp8", arch, blocks)
