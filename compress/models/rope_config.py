"""Rotary embeddings in `config.json`: `rope_parameters` (flat, or one mapping per layer type), or the older
pair of fields.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.config_fields import field_name
from compress.models.layer_shape import Rope
from compress.models.limits import FACTORS, FREQUENCY_FACTORS, MAX_POSITIONS, ROPE_KINDS, THETAS
from compress.quant.scheme import SCHEMES
from compress.untrusted.fields import Fields

ROPE_FIELDS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "attn_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "partial_rotary_factor",
        "short_factor",
        "long_factor",
    ]
)
DYNAMIC = "dynamic"
"""The rope type whose frequencies `transformers` changes beyond `max_position_embeddings`, where no position
lies here: up to there it is the plain rope. Other programs may scale it from the first position on."""
YARN_FACTOR = "attn_factor"
"""A factor of YaRN's own, which `transformers` does not read."""
YARN_FACTOR_NOTE = (
    f"config.json has {YARN_FACTOR} in its rope, which multiplies YaRN's factor of cos and sin, as in YaRN's "
    "own program and vLLM; transformers does not read it, and computes another function."
)
_BLOCK_ROWS = SCHEMES["FP8_BLOCK"].block_rows
_TURNS = (1e-6, 1e6)
_SECTIONS = ("mrope_section", "xdrope_section", "mrope_interleaved", "interleaved")
_NAMES = ("rope_parameters", "rope_scaling")


def rope_of_text(config: Fields) -> dict[str, Any]:
    """Return `rope_parameters` of families whose rope has sections for the time, height and width of a token
    (mrope), in turns or one after the other. The three positions are equal for text: it is the plain rope."""
    rope = config.mapping("rope_parameters", default=config.mapping("rope_scaling", default={}))
    return {"rope_parameters": without_sections(rope) or {"rope_type": "default"}}


def without_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rope with sections is for text."""
    plain = {name: value for name, value in rope.items() if name not in _SECTIONS}
    for name in ("rope_type", "type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain


def rope_of_alpha(config: Fields, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of families whose dynamic rope, where it states an `alpha` that is not 0,
    stretches the base by a^(C / (C - 2)) for every length: the plain rope with another base. Hunyuan-VL has
    another name for it."""
    name = next((each for each in _NAMES if config.has(each)), None)
    rope = Fields({}, config.where, UnsupportedArch) if name is None else config.fields(name)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    alpha = rope.number("alpha", 0, FACTORS[1], default=0.0)
    if kind not in (DYNAMIC, "xdrope") or not alpha:
        return {}
    if head_dim < 4:
        raise config.wrong("head_dim", head_dim, "at least 4 with an alpha of the rope")
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", *THETAS)
    return {"rope_parameters": {"rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}}


def check_one_rope(raw: Mapping[str, Any], where: str) -> None:
    """Check that a config with both `rope_parameters` and `rope_scaling` states the same rope by both names.

    Raises:
        UnsupportedArch: they differ, so that programs compute different ropes of the config.
    """
    config = Fields(raw, where, UnsupportedArch)
    stated = [config.mapping(name) for name in _NAMES if config.has(name)]
    if not all(stated) or len(stated) < 2:
        return
    newer, older = ({**rope, "rope_type": rope.get("rope_type", rope.get("type"))} for rope in stated)
    for name in ("rope_theta", "partial_rotary_factor"):
        for rope in (newer, older):
            rope.setdefault(name, raw.get(name))
    differ = sorted(
        name for name in (newer.keys() | older.keys()) - {"type"} if newer.get(name) != older.get(name)
    )
    if differ:
        raise UnsupportedArch(
            f"{where} has rope_parameters and rope_scaling, which differ in "
            f"{', '.join(field_name(name) for name in differ)}: some programs compute the one, others the "
            "other. Write what is meant into one of them and remove the other."
        )


def read_rope(config: Fields, layer_type: str, head_dim: int) -> Rope:
    """Read the rope of one layer from `rope_parameters` (flat, or one mapping per layer type) or the older
    `rope_theta` + `rope_scaling`. Of heads wider than a block of rows that share scales the dimensions that
    rotate lead, as they do on disk: in another order, blocks would hold rows of several on disk.

    Raises:
        UnsupportedArch: a field is missing, unknown, of another type or out of range.
    """
    rope, values = _stated(config)
    by_layer_type = any(isinstance(value, Mapping) for key, value in values.items() if key not in ROPE_FIELDS)
    if by_layer_type:
        rope = rope.fields(layer_type)
    unknown = sorted(key for key in rope if key not in ROPE_FIELDS and rope.has(key))
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == DYNAMIC:
        kind = "default"
    if unknown or kind not in ROPE_KINDS:
        what = f"field(s) {', '.join(unknown)}" if unknown else f"rope_type '{kind:.80}'"
        raise UnsupportedArch(
            f"rope_parameters has {what}, not known here; known rope types: {', '.join(ROPE_KINDS)}."
        )
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", *THETAS)
    factor = rope.number("factor", *FACTORS, default=1.0)
    low = rope.number("low_freq_factor", *_TURNS, default=1.0)
    high = rope.number("high_freq_factor", *_TURNS, default=4.0)
    if kind == "llama3" and low > high:
        raise rope.wrong("high_freq_factor", high, f"at least low_freq_factor, {low:g}")
    places = (rope,) if by_layer_type else (config, rope)
    rotary_dim = _rotary_dim(rope if rope.has("partial_rotary_factor") else config, head_dim)
    original = _original_max_position(places, config) if kind in ("llama3", "yarn", "longrope") else 0
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", *_TURNS, default=32.0),
        beta_slow=rope.number("beta_slow", *_TURNS, default=1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=_attention_factor(kind, rope, config, original),
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        leading=rotary_dim < head_dim and head_dim > _BLOCK_ROWS and kind != "proportional",
        short_factors=_frequency_factors(kind, rope, "short_factor", rotary_dim),
        long_factors=_frequency_factors(kind, rope, "long_factor", rotary_dim),
    )


def check_factors_of_types(config: Fields) -> None:
    """Refuse a share of rotating dimensions next to ropes by type of layer, where `transformers` reads none.

    Raises:
        UnsupportedArch: there is one other than 1.
    """
    name = "partial_rotary_factor"
    if config.number(name, 0, 1, default=1.0) != 1:
        raise config.wrong(name, config.number(name, 0, 1), "in the ropes of the types of layers")


def check_plain_ropes(config: Fields, types: Sequence[str]) -> None:
    """Refuse plain ropes of some types of layers that rotate a part of their heads, which `transformers`
    rotates whole in some families.

    Raises:
        UnsupportedArch: there is one.
    """
    ropes = config.fields("rope_parameters")
    for kind in types:
        rope = ropes.fields(kind, default={})
        share = rope.number("partial_rotary_factor", 0, 1, default=1.0)
        if share != 1 and rope.text("rope_type", default="default") == "default":
            raise rope.wrong("partial_rotary_factor", share, "1 in a plain rope of this family")


def score_factor(config: Fields) -> float:
    """Return the factor of attention scores that the rope of latent attention implies: the square of YaRN's
    softmax temperature for `mscale_all_dim`, where a rope that is not the plain one states it."""
    rope, _ = _stated(config)
    mscale = rope.number("mscale_all_dim", 0, FACTORS[1], default=0.0)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if not mscale or kind == "default":
        return 1.0
    return _temperature(rope.number("factor", *FACTORS), mscale) ** 2


def _stated(config: Fields) -> tuple[Fields, Mapping[str, Any]]:
    """Return the rope that a config states, as fields and as it is."""
    name = next((each for each in _NAMES if config.has(each) and config.mapping(each)), None)
    if name is None:
        return Fields({}, f"the rope of {config.where}", UnsupportedArch), {}
    return config.fields(name), config.mapping(name)


def part_that_rotates(config: Fields, head_dim: int, name: str = "rotary_dim") -> float:
    """Return the `partial_rotary_factor` of a family whose config states the number of dimensions instead:
    the part of a head from which the product with `head_dim`, rounded down, is that number.

    Raises:
        UnsupportedArch: the number is odd or more than a head has.
    """
    rotary_dim = config.integer(name, 2, head_dim)
    if rotary_dim % 2:
        raise config.wrong(name, rotary_dim, f"even, a part of the {head_dim} dimensions of a head")
    part = rotary_dim / head_dim
    return part if int(head_dim * part) == rotary_dim else math.nextafter(part, 1.0)


def _rotary_dim(stated: Fields, head_dim: int) -> int:
    """Return the number of dimensions of a head that rotate; it is even."""
    fraction = stated.number("partial_rotary_factor", 0, 1, default=1.0)
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise stated.wrong(
            "partial_rotary_factor", fraction, f"a part of the {head_dim} dimensions of a head that is even"
        )
    return rotary_dim


def _frequency_factors(kind: str, rope: Fields, name: str, rotary_dim: int) -> tuple[float, ...]:
    """Return LongRoPE's factors, one for each pair of dimensions that rotates."""
    if kind != "longrope":
        return ()
    factors = rope.numbers(name, *FREQUENCY_FACTORS)
    if len(factors) != rotary_dim // 2:
        raise rope.wrong(name, f"{len(factors)} numbers", f"{rotary_dim // 2} numbers, one for each pair")
    return tuple(factors)


def _original_max_position(places: tuple[Fields, ...], config: Fields) -> int:
    """Return the number of positions before the rescaling: what the first of `places` states that states it,
    else the number that the model has. As in `transformers`, the config's own comes before the rope's."""
    name = "original_max_position_embeddings"
    for stated in places:
        if stated.has(name):
            return stated.integer(name, 1, MAX_POSITIONS)
    return config.integer("max_position_embeddings", 1, MAX_POSITIONS)


def _attention_factor(kind: str, rope: Fields, config: Fields, original_max_position: int) -> float:
    """Return the factor of cos and sin."""
    own = rope.number(YARN_FACTOR, *_TURNS, default=1.0)
    if own != 1 and (kind != "yarn" or rope.has("attention_factor")):
        raise UnsupportedArch(
            f"rope_parameters has {YARN_FACTOR}, which multiplies the factor that YaRN computes: it goes "
            "with rope_type 'yarn' without attention_factor."
        )
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.has("attention_factor"):
        return rope.number("attention_factor", *_TURNS)
    if kind == "longrope":
        return _longrope_attention_factor(rope, config, original_max_position)
    return own * _yarn_attention_factor(rope, rope.number("factor", *FACTORS, default=1.0))


def _longrope_attention_factor(rope: Fields, config: Fields, original_max_position: int) -> float:
    """Return sqrt(1 + ln(s) / ln(n)) for n positions stretched by s (arXiv 2402.13753)."""
    factor = (
        rope.number("factor", *FACTORS)
        if rope.has("factor")
        else config.integer("max_position_embeddings", 1, MAX_POSITIONS) / original_max_position
    )
    if factor <= 1 or original_max_position < 2:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Return the softmax temperature of YaRN: 0.1 ln(factor) + 1, or what the config's scales make of it."""

    mscale = rope.number("mscale", 0, FACTORS[1], default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", 0, FACTORS[1], default=0.0)
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor)


def _temperature(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def states_yarn_factor(config: Mapping[str, Any]) -> bool:
    """Return whether a rope of a config that was read, or of its text model, has a `YARN_FACTOR` that is not
    1."""

    def mappings(values: Iterable[Any]) -> list[Mapping[str, Any]]:
        return [each for each in values if isinstance(each, Mapping)]

    configs = mappings((config, config.get("text_config")))
    ropes = mappings(each.get(name) for each in configs for name in _NAMES)
    by_layer_type = mappings(each for rope in ropes for each in rope.values())
    return any(each.get(YARN_FACTOR) not in (None, 1) for each in (*ropes, *by_layer_type))
