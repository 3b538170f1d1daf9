"""Tiny models around a text model, as wide as groups of 128 need, and their linears rounded to nearest."""

from pathlib import Path
from typing import Any

import torch

from compress.models.checkpoint import Checkpoint
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import inner_widths, saved
from tests.support.tiny_wrappers import AROUND

WRAPPERS = [case for case, (family, _) in CASES.items() if family in AROUND]
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def wide(case: str, directory: Path, **others: Any) -> Any:
    """Save the tiny model of a case with these widths, and with `others` for what its text config states."""
    family, changes = CASES[case]
    changes = {**changes, **others}
    sizes = dict(WIDE)
    if "num_kv_shared_layers" in changes:  # the second layer reads the keys and values of the first
        sizes |= {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1}
    if "intermediate_size_mlp" in changes:
        sizes["intermediate_size_mlp"] = 2 * WIDE["intermediate_size"]
    if "short_factor" in changes.get("rope_parameters", {}):  # one for each pair of a head's dimensions
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8}
    if "moe_intermediate_size" in changes:  # transformers would take square experts for those of its memory
        of_each = isinstance(changes["moe_intermediate_size"], list)
        sizes["moe_intermediate_size"] = [256, 128] if of_each else 256
    if "moe_hidden_size" in changes:
        sizes |= inner_widths(changes, 128)
    if "share_expert_dim" in changes:
        sizes["share_expert_dim"] = 256
    if "linear_value_head_dim" in changes:
        sizes |= inner_widths(changes, 128) | {"linear_key_head_dim": 128, "head_dim": 256}
    if "mamba_num_heads" in changes or "d_rel" in changes:
        sizes |= inner_widths(changes, 128)
    if "dense_intermediate_size" in changes:
        sizes |= {**inner_widths(changes, 128), "index_n_heads": WIDE["num_key_value_heads"]}
    if "kv_lora_rank" in changes:
        del sizes["head_dim"]
        sizes |= {"kv_lora_rank": 128, "v_head_dim": 32}
        sizes |= {"q_lora_rank": 128} if changes.get("q_lora_rank") else {}
        rope_dim = 0 if changes["qk_rope_head_dim"] == 0 else 16
        sizes |= {"qk_nope_head_dim": 32 - rope_dim, "qk_rope_head_dim": rope_dim}
    if "linear_num_heads" in changes:
        sizes |= {"linear_num_heads": 4, "linear_head_dim": 32}
    if "swa_v_head_dim" in changes:
        own = ("swa_", "shared_experts", "index_head_dim")
        sizes |= {name: each for name, each in inner_widths(changes, 128).items() if name.startswith(own)}
    return saved(directory, family, {**changes, **sizes, **others}, dtype=torch.bfloat16)


class Rounded:
    """A dense source with its linears rounded to nearest."""

    kv_format = None

    def __init__(self, source: Checkpoint, scheme: ModelScheme) -> None:
        self.arch = source.arch
        self._source = source
        self._scheme = scheme

    def outer(self) -> Any:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Any:
        layer = self._source.layer(layer_idx)
        for linear in self.arch.layers[layer_idx].linears:
            scheme = self._scheme.for_linear(f"layers.{layer_idx}.{linear}")
            if scheme is not None:
                weight = dense(layer[f"{linear}.weight"])
                layer[f"{linear}.weight"] = nearest_weight(weight, scheme, torch.bfloat16)
        return layer
