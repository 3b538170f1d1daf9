"""The groups of linears of a layer that read one input. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass

from compress.models.experts import SHARED_MID
from compress.models.latent import KV_LATENT, Q_LATENT


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a layer that read one input; a runtime stacks their rows, in this order, into one product.

    `tap` names the point of the forward where that input is observed.
    """

    name: str
    tap: str
    linears: tuple[str, ...]


LINEAR_GROUPS: Mapping[str, LinearGroup] = {
    group.name: group
    for group in (
        LinearGroup("qkv", "attn_in", ("attn.q", "attn.k", "attn.v")),
        LinearGroup("o", "attn_out", ("attn.o",)),
        LinearGroup("gate_up", "ffn_in", ("ffn.gate", "ffn.up")),
        LinearGroup("down", "ffn_mid", ("ffn.down",)),
    )
}
"""The linear groups of a dense layer by name, in execution order."""
UNGATED_FFN = LinearGroup("gate_up", "ffn_in", ("ffn.up",))
"""The first group of an FFN without gates."""
KEYS_ONLY = LinearGroup("qkv", "attn_in", ("attn.q", "attn.k"))
"""The first group of a layer whose values are its keys."""
QUERIES_ONLY = LinearGroup("qkv", "attn_in", ("attn.q",))
"""The first group of a layer that reads the keys and values of an earlier one."""
RECURRENT_OUT = "recurrent_out"
"""The tap of the outputs of a recurrence in a joint layer."""
LATENTS = LinearGroup("qkv", "attn_in", ("attn.q_down", "attn.kv_down"))
Q_AND_LATENT = LinearGroup("qkv", "attn_in", ("attn.q", "attn.kv_down"))
"""The first group of a layer with latent attention, with and without a latent of queries."""
COMPRESSED = LinearGroup("qkv", "attn_in", ("attn.q_down", "attn.kv"))
"""The first group of a layer with compressed attention."""
OUTPUT_GATE_LINEAR = "attn.gate"
"""The linear of an output gate, the last of the first group of a layer that has one."""
OF_LATENTS = (
    LinearGroup("q_up", Q_LATENT, ("attn.q_up",)),
    LinearGroup("kv_up", KV_LATENT, ("attn.kv_up",)),
)
"""The linears that read latents."""


def expert_groups(name: str, shared_tap: str, *, gated: bool = True) -> tuple[LinearGroup, LinearGroup]:
    """Return the two linear groups of the expert `moe.shared` or `moe.experts.3`: gate, where it has one, and
    up; and down. The taps of an expert see only its tokens, those of the shared one see all; `shared_tap` is
    its first."""
    short = name.removeprefix("moe.").replace("experts", "expert")
    suffix = "" if short == "shared" else f".{short.rpartition('.')[2]}"
    taps = ("moe_in", "moe_mid") if suffix else (shared_tap, SHARED_MID)
    first = (f"{name}.gate", f"{name}.up") if gated else (f"{name}.up",)
    return (
        LinearGroup(f"{short}.gate_up", f"{taps[0]}{suffix}", first),
        LinearGroup(f"{short}.down", f"{taps[1]}{suffix}", (f"{name}.down",)),
    )
