"""The facts of a model as a manifest states them (`Arch` documents each)."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compress.errors import StorageError
from compress.models.gated_residual import streams_from_json
from compress.models.hyper_connection import MAX_STREAMS
from compress.models.limits import CAPS, MAX_POSITIONS, MAX_SIZE, SCALES
from compress.untrusted.fields import Fields

if TYPE_CHECKING:
    from compress.models.arch import Arch

NORMS = ("rms", "layer")
BLOCKS = ("pre", "post", "sandwich", "parallel")
_FLAGS = (
    "whole_qk_norm",
    "attn_sinks",
    "v_norm",
    "layer_scalar",
    "growth_unrotated",
    "unit_qk_norm",
    "rotates_first",
    "own_qk_norm",
    "plain_final_norm",
    "unit_norm_unrotated",
    "embed_norm",
    "norm_bias",
    "own_ffn_norm",
    "unit_norms",
    "windowed_sinks",
    "learned_growth",
    "head_bias",
    "embed_norm_weight",
    "inverse_scale",
    "qk_norm_bias",
    "sinusoidal_positions",
)


def facts_to_json(arch: "Arch") -> dict[str, Any]:
    """Return the facts of a model without its layers. What few models have is left out where it does not have
    it."""
    facts = {
        field.name: getattr(arch, field.name)
        for field in dataclasses.fields(arch)
        if field.name != "layers" and not _is_default(field, getattr(arch, field.name))
    }
    if arch.linear_factors:
        facts["linear_factors"] = dict(arch.linear_factors)
    if arch.hyper is not None:
        facts["hyper"] = arch.hyper.to_json()
    return {**facts, "config": dict(arch.config)}


def facts_from_json(of: "type[Arch]", facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an `Arch` but its layers from what `facts_to_json` wrote.

    Raises:
        StorageError: a value is missing, unknown, of another type or out of range.
    """
    fields = [field for field in dataclasses.fields(of) if field.name != "layers"]
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if odd := sorted((required - facts.keys()) | (facts.keys() - {field.name for field in fields})):
        raise StorageError(f"the arch of a manifest has missing or unknown fields: {', '.join(odd)}.")
    model = Fields(facts, "the arch of a manifest", StorageError)
    check_plain_facts(model)
    return {**facts, **rare_facts(model)}


def _is_default(field: "dataclasses.Field[Any]", value: Any) -> bool:
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def check_plain_facts(model: Fields) -> None:
    """Check the facts that every manifest states.

    Raises:
        StorageError: one is missing, of another type or out of range.
    """
    for name in ("family", "activation", "dtype"):
        model.text(name)
    for name in ("vocab_size", "hidden_size"):
        model.integer(name, 1, MAX_SIZE)
    model.integer("max_position", 1, MAX_POSITIONS)
    model.number("norm_eps", 0, 1)
    for name in ("tied_head", "qkv_bias", "o_bias", "ffn_bias", "qk_norm"):
        model.flag(name)
    model.mapping("config")


def rare_facts(model: Fields) -> dict[str, Any]:
    """Return the facts with a default that a manifest states."""
    rare: dict[str, Any] = {}
    for name, known in (("norm", NORMS), ("block", BLOCKS), ("recurrent_block", BLOCKS)):
        if model.has(name) and model.text(name) not in known:
            raise model.wrong(name, model.text(name), f"one of {', '.join(known)}")
    for name in _FLAGS:
        if model.has(name):
            model.flag(name)
    for name in ("norm_offset", "embed_scale", "residual_scale", "logit_scale", "logit_softcap"):
        if model.has(name):
            model.number(name, *SCALES)
    for name in ("attn_scale", "attn_softcap"):
        if model.has(name):
            model.number(name, *SCALES)
    if model.has("qkv_clip"):
        model.number("qkv_clip", *CAPS)
    for name in ("post_norm_eps", "recurrent_norm_eps", "latent_eps"):
        if model.has(name):
            model.number(name, 0, 1)
    if model.has("query_growth"):
        growth = model.numbers("query_growth", 0, MAX_POSITIONS)
        if len(growth) != 2 or growth[1] < 1:
            raise model.wrong("query_growth", growth, "a factor and a number of positions")
        rare["query_growth"] = (growth[0], int(growth[1]))
    if model.has("linear_factors"):
        factors = model.fields("linear_factors")
        rare["linear_factors"] = tuple((name, factors.number(name, *SCALES)) for name in factors)
    if model.has("hyper"):
        rare["hyper"] = streams_from_json(model.fields("hyper"))
    if model.has("growth_offset"):
        model.integer("growth_offset", 0, MAX_POSITIONS)
    for name in ("position_offset", "layer_embed_size", "layer_embed_vocab", "laurel_rank", "head_vocab"):
        if model.has(name):
            model.integer(name, 0, MAX_SIZE)
    if model.has("altup_streams"):
        model.integer("altup_streams", 2, MAX_STREAMS)
    return rare
