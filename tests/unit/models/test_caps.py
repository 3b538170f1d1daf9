"""Caps of activated gates and of what they multiply, which layers have for their FFN or for their experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.errors import StorageError, UnsupportedArch
from compress.kernels.coverage import coverage
from compress.kernels.problem import KernelDevice
from compress.models.experts import Experts
from compress.models.ffn import gated
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_manifest import layer_from_json, layer_to_json
from compress.models.weights import build_decoder
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
SHARED = Experts(6, 2, 48, shared_size=96)
CAPPED = (
    tiny_shape(ffn_cap=0.02),
    tiny_shape(experts=SHARED, ffn_cap=0.03),
    tiny_shape(experts=SHARED, expert_cap=0.01),
)


def test_a_gate_is_capped_after_its_activation_and_what_it_multiplies_on_both_sides() -> None:
    gate = torch.tensor([-5.0, 0.5, 3.0, 9.0])
    up = torch.tensor([-9.0, 1.0, -9.0, 9.0])
    activated = gate / (1 + torch.exp(-gate))
    expected = torch.tensor([activated[0] * -2, activated[1], 2 * -2, 2 * 2])
    torch.testing.assert_close(gated("silu", gate, up, 2.0), expected)
    torch.testing.assert_close(gated("silu", gate, up), activated * up)


@pytest.mark.parametrize("capped", CAPPED)
def test_each_cap_changes_what_the_decoder_computes(capped: Any) -> None:
    tokens_BS = torch.arange(20).view(1, 20)
    logits = [
        build_decoder(tiny_source(layers=(shape,)), dtype=torch.float32, device=CPU)(tokens_BS)
        for shape in (capped, replace(capped, ffn_cap=None, expert_cap=None))
    ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3 * logits[1].abs().max()


def test_nothing_moves_a_scale_through_what_is_clamped() -> None:
    producers = {}
    for shape in (*CAPPED, tiny_shape()):
        layer = build_decoder(tiny_source(layers=(shape,)), dtype=torch.float32, device=CPU).layers[0]
        producers[shape] = {pair.producer for pair in layer.smoothing_pairs()}
    assert "ffn.up" in producers[tiny_shape()]
    assert "ffn.up" not in producers[CAPPED[0]]
    assert "moe.shared.up" not in producers[CAPPED[1]]
    assert "moe.experts.0.up" in producers[CAPPED[1]]
    assert "moe.shared.up" in producers[CAPPED[2]]
    assert "moe.experts.0.up" not in producers[CAPPED[2]]


def test_a_shared_expert_of_another_cap_stays_apart() -> None:
    assert tiny_shape(experts=SHARED).shared_parts == 2
    assert replace(CAPPED[1], expert_cap=0.03).shared_parts == 2
    assert [each.shared_parts for each in CAPPED] == [0, 0, 0]
    first = replace(SHARED, caps_first=True)
    assert tiny_shape(experts=first, ffn_cap=0.5, expert_cap=0.5).shared_parts == 0


def test_kernels_are_listed_for_experts_with_the_shared_one_and_without() -> None:
    source = tiny_source(layers=(tiny_shape(experts=SHARED), CAPPED[1]))
    rows = coverage(source.arch, KernelDevice("cuda", 90, torch.bfloat16))
    experts = {row.problem.experts for row in rows if row.name == "experts"}
    assert experts == {6, 8}


def test_one_product_of_gate_and_up_applies_no_capped_activation() -> None:
    arch = tiny_source(layers=(CAPPED[0], tiny_shape())).arch
    assert [arch.fused_activation(layer) for layer in arch.layers] == [None, "silu"]


def test_a_gate_of_a_dense_ffn_may_be_capped_before_its_activation() -> None:
    """silu(min(gate, cap)) is min(silu(gate), silu(cap)), which is below min(silu(gate), cap)."""
    first = replace(CAPPED[0], caps_first=True)
    decoder = build_decoder(tiny_source(layers=(first,)), dtype=torch.float32, device=CPU)
    ffn = decoder.layers[0].ffn
    x = torch.randn(7, 56, generator=torch.Generator().manual_seed(0))
    gate = torch.nn.functional.silu(ffn.gate(x).clamp(max=0.02))
    torch.testing.assert_close(ffn.mid(x), gate * ffn.up(x).clamp(-0.02, 0.02))
    assert decoder.arch.fused_activation(first) is None
    assert layer_to_json(first)["caps_first"] is True
    assert "caps_first" not in layer_to_json(CAPPED[0])


@pytest.mark.parametrize("capped", [*CAPPED, replace(CAPPED[0], caps_first=True)])
def test_a_manifest_states_the_caps(capped: Any) -> None:
    stored = layer_to_json(capped)
    assert layer_from_json(stored, 0) == capped
    assert {"ffn_cap", "expert_cap"}.isdisjoint(layer_to_json(tiny_shape()))
    for odd in (0, -1, "7", True):
        with pytest.raises(StorageError, match="_cap"):
            layer_from_json({**stored, "ffn_cap": odd}, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expert_cap": 1.0}, "has none"),
        ({"ffn_cap": 1.0, "experts": Experts(6, 2, 48)}, "shared expert"),
        ({"ffn_cap": 1.0, "only_half": "mixer"}, "no FFN"),
        ({"ffn_cap": 1.0, "gated": False}, "without a gate"),
        ({"caps_first": True}, "has no cap"),
        ({"ffn_cap": 1.0, "caps_first": True, "experts": SHARED}, "experts in place"),
    ],
)
def test_caps_without_what_they_cap_are_refused(changes: dict[str, Any], reason: str) -> None:
    found = why_layer_unfit(tiny_shape(**changes))
    assert found is not None
    assert reason in found


def test_a_clamped_activation_has_no_cap_of_a_layer() -> None:
    with pytest.raises(UnsupportedArch, match="swiglu_clamped"):
        tiny_source(layers=(CAPPED[0],), activation="swiglu_clamped")
    with pytest.raises(UnsupportedArch, match="gates of the FFN are capped before"):
        tiny_source(layers=(replace(CAPPED[0], caps_first=True),), activation="gelu")
