"""The linear groups of a decoder layer, and the sets of linears that have one scheme."""

from dataclasses import replace
from typing import TYPE_CHECKING

from compress.models.compressed import OUT_TAP
from compress.models.experts import ALL_TOKENS, SHARED_IN
from compress.models.linear_groups import (
    COMPRESSED,
    KEYS_ONLY,
    LATENTS,
    LINEAR_GROUPS,
    OF_LATENTS,
    OUTPUT_GATE_LINEAR,
    Q_AND_LATENT,
    QUERIES_ONLY,
    RECURRENT_OUT,
    UNGATED_FFN,
    LinearGroup,
    expert_groups,
)

if TYPE_CHECKING:
    from compress.models.layer_shape import LayerShape


def attention_groups_of(layer: "LayerShape") -> tuple[LinearGroup, ...]:
    """Return the linear groups of attention, or of what is in its place (`LayerShape.attention_groups`)."""
    if not layer.has_mixer:
        return ()
    if layer.recurrence is not None and layer.joint:
        first = (*LINEAR_GROUPS["qkv"].linears, *layer.recurrence.first_linears)
        own_o = f"{layer.recurrence.module}.o"
        return (
            LinearGroup("qkv", "attn_in", first),
            LINEAR_GROUPS["o"],
            LinearGroup("recurrent_o", RECURRENT_OUT, (own_o,)),
        )
    if layer.recurrence is not None:
        return (
            LinearGroup("qkv", "attn_in", layer.recurrence.first_linears),
            LinearGroup("o", "attn_out", (f"{layer.recurrence.module}.o",)),
        )
    if layer.compressed is not None:
        downs = (
            LinearGroup(f"o_down.{idx}", f"{OUT_TAP}.{idx}", (linear,))
            for idx, linear in enumerate(layer.compressed.out_linears)
        )
        return COMPRESSED, OF_LATENTS[0], *downs, LINEAR_GROUPS["o"]
    if layer.kv_source is not None:
        of_latents = () if layer.latent is None else OF_LATENTS[1:]
        return QUERIES_ONLY, *of_latents, LINEAR_GROUPS["o"]
    if layer.latent is None:
        own = KEYS_ONLY if layer.keys_are_values else LINEAR_GROUPS["qkv"]
        return _gated(layer, own), LINEAR_GROUPS["o"]
    if not layer.latent.q_rank:
        return _gated(layer, Q_AND_LATENT), OF_LATENTS[1], LINEAR_GROUPS["o"]
    return _gated(layer, LATENTS), *OF_LATENTS, LINEAR_GROUPS["o"]


def _gated(layer: "LayerShape", first: LinearGroup) -> LinearGroup:
    """Return the first group of attention, with the linear of the output gate where there is one."""
    return replace(first, linears=(*first.linears, OUTPUT_GATE_LINEAR)) if layer.output_gate else first


def ffn_groups_of(layer: "LayerShape") -> tuple[LinearGroup, ...]:
    """Return the linear groups of an FFN, or of a mixture of experts."""
    if layer.experts is None:
        return LINEAR_GROUPS["gate_up"] if layer.gated else UNGATED_FFN, LINEAR_GROUPS["down"]
    shared_tap = SHARED_IN if layer.experts.branch_norms else ALL_TOKENS
    pairs = [expert_groups(name, shared_tap, gated=layer.gated) for name in layer.experts.names]
    return (*(first for first, _ in pairs), *(second for _, second in pairs))


def units_of(layer: "LayerShape") -> tuple[LinearGroup, ...]:
    """Return the sets of linears that have one scheme (`LayerShape.units`)."""
    groups = layer.groups
    if layer.compressed is not None:
        *first, o = layer.attention_groups
        outs = LinearGroup("o_down", OUT_TAP, layer.compressed.out_linears)
        own = (each for each in first if not each.tap.startswith(OUT_TAP))
        groups = (*own, outs, o, *groups[len(first) + 1 :])
    if layer.experts is None:
        return groups
    routed: dict[str, list[str]] = {"gate_up": [], "down": []}
    for group in groups:
        if group.name.startswith("expert."):
            routed[group.name.rpartition(".")[2]] += group.linears
    plain = tuple(group for group in groups if not group.name.startswith("expert."))
    return (
        *plain,
        LinearGroup("experts.gate_up", "moe_in", tuple(routed["gate_up"])),
        LinearGroup("experts.down", "moe_mid", tuple(routed["down"])),
    )
