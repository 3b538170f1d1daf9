"""The `config_groups` of compressed-tensors: which linears have which scheme, and how their codes are stored.

Fields and their meaning are those of compressed-tensors 0.20 (`QuantizationScheme`, `QuantizationArgs`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from compress.errors import UnsupportedFormat
from compress.models.limits import MAX_SIZE
from compress.quant.scheme import SCHEMES, Scheme, known_scheme, weight_only_scheme
from compress.untrusted.fields import Fields
from compress.untrusted.pattern import compile_pattern

PACK_FORMAT = "pack-quantized"
FLOAT_FORMAT = "float-quantized"
BYTE_SCALE_FORMATS = {
    (4, "e4m3"): "nvfp4-pack-quantized",
    (4, "e8m0"): "mxfp4-pack-quantized",
    (8, "e8m0"): "mxfp8-quantized",
}
"""Forms of floats with scales of one byte, by their bits and the type of the scales."""
BYTE_SCALE_GROUPS = {"e4m3": ("tensor_group", "torch.float8_e4m3fn"), "e8m0": ("group", "torch.uint8")}
"""Strategy and dtype of these scales, as a group states them."""
INT_FORMAT = "int-quantized"
MIXED_FORMAT = "mixed-precision"
NAIVE_FORMAT = "naive-quantized"
"""Another name of the two forms that keep codes as they are."""
PACKED_BITS = (2, 3, 4, 8)
"""Bits of packed integers."""
ALL_LINEARS = "Linear"
"""The target that means every linear of the model which nothing else names."""


def read_groups(quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Return the scheme of each of `linears` that a `quantization_config` quantizes.

    Raises:
        UnsupportedFormat: a group's scheme is not read, two groups have one target, or a target is no linear.
    """
    by_target: dict[str, Scheme] = {}
    stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
    groups = Fields(stated.mapping("config_groups", default={}), "config_groups", UnsupportedFormat)
    for name in groups:
        group = groups.fields(name)
        scheme = _read_scheme(
            groups.mapping(name), group, group.text("format", default=stated.text("format", default=""))
        )
        for target in dict.fromkeys(group.texts("targets", default=())):
            if target in by_target:
                raise UnsupportedFormat(
                    f"two of the checkpoint's config_groups target {target}; they contradict each other."
                )
            by_target[target] = scheme
    _check_targets(by_target, linears)
    ignored = stated.texts("ignore", default=())
    quantized = [linear for linear in linears if not any(_names(pattern, linear) for pattern in ignored)]
    found = {linear: _scheme_of(linear, by_target) for linear in quantized}
    return {linear: scheme for linear, scheme in found.items() if scheme is not None}


def format_of(scheme: Scheme) -> str:
    """Return the form in which the codes of a scheme are stored."""
    if scheme.scale_type is not None:
        return BYTE_SCALE_FORMATS[scheme.num_bits, scheme.scale_type]
    if scheme.type == "float":
        return FLOAT_FORMAT
    return INT_FORMAT if scheme.input_dtype == torch.int8 else PACK_FORMAT


def group_of(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    """Return the group that states `scheme` for the linears named by `targets`."""
    common: dict[str, Any] = {"num_bits": scheme.num_bits, "type": scheme.type, "symmetric": scheme.symmetric}
    weights = common | {"strategy": scheme.strategy, "group_size": scheme.group_size, "dynamic": False}
    inputs = {
        "num_bits": 8,
        "type": "int" if scheme.input_dtype == torch.int8 else "float",
        "symmetric": scheme.input_symmetric,
        "strategy": scheme.activation,
        "group_size": None,
        "dynamic": scheme.activation != "tensor",
    }
    if scheme.scale_type is not None:
        strategy, scale_dtype = BYTE_SCALE_GROUPS[scheme.scale_type]
        weights |= {"strategy": strategy, "scale_dtype": scale_dtype}
        # "local": block scales are found at run time, the global scale is the checkpoint's
        inputs = weights | {"dynamic": "local" if scheme.has_input_global_scale else True}
    if scheme.block_rows > 1:
        weights |= {"group_size": None, "block_structure": [scheme.block_rows, scheme.group_size]}
        inputs |= {"group_size": scheme.group_size}
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": inputs if scheme.activation is not None else None,
        "output_activations": None,
        "format": format_of(scheme),
    }


def _check_targets(targets: Iterable[str], linears: list[str]) -> None:
    """Raise UnsupportedFormat where a target is neither all linears, nor a pattern, nor a linear of this
    model."""
    for target in targets:
        if not (target == ALL_LINEARS or target.startswith("re:") or target in linears):
            raise UnsupportedFormat(
                f"the checkpoint's config_groups target '{target}'; {ALL_LINEARS}, a linear's full name and "
                "patterns behind 're:' are read."
            )


def _scheme_of(linear: str, by_target: Mapping[str, Scheme]) -> Scheme | None:
    """Return the scheme of a linear. A full name goes before a pattern, patterns in alphabetical order, the
    class last: the order of the format's own library."""
    for target in sorted(by_target, key=lambda each: (each.startswith("re:"), each)):
        if target != ALL_LINEARS and _names(target, linear):
            return by_target[target]
    return by_target.get(ALL_LINEARS)


def _names(pattern: str, module: str) -> bool:
    """Return whether a pattern names a module: an exact module name, or a regular expression after `re:`, as
    the format defines `targets` and `ignore`."""
    if not pattern.startswith("re:"):
        return pattern == module
    return matches_module(pattern.removeprefix("re:"), module)


def matches_module(pattern: str, module: str) -> bool:
    """Return whether a regular expression of a checkpoint's config matches the start of a module's name.

    Raises:
        UnsupportedFormat: it is no regular expression, or one that may take for ever.
    """
    try:
        return compile_pattern(pattern).match(module) is not None
    except ValueError as error:
        raise UnsupportedFormat(
            f"quantization_config has the pattern {pattern!r:.80}, which is not read: {error}."
        ) from None


def _read_scheme(group: Mapping[str, Any], typed: Fields, form: str) -> Scheme:
    for name in ("weights", "input_activations", "output_activations"):
        typed.mapping(name, default={})
    if group.get("output_activations"):
        raise UnsupportedFormat(
            "the checkpoint quantizes the output activations of linears; input activations are read."
        )
    if form in BYTE_SCALE_FORMATS.values():
        return _read_byte_scales(group, form)
    if (group.get("weights") or {}).get("type") == "float":
        return _read_float(group, form)
    return _read_int(group, form) if form == PACK_FORMAT else _read_int8(group, form)


def _read_int(group: Mapping[str, Any], form: str) -> Scheme:
    weights = group.get("weights") or {}
    bits = weights.get("num_bits")
    kind = weights.get("type")
    strategy = weights.get("strategy")
    if (
        kind != "int"
        or type(bits) is not int
        or bits not in PACKED_BITS
        or strategy not in ("group", "channel")
    ):
        raise UnsupportedFormat(
            f"the checkpoint's weights are format {form}, type {kind}, {bits} bits, strategy {strategy}; "
            f"{PACK_FORMAT} with int, 2, 3, 4 or 8 bits, per group or channel is read."
        )
    if weights.get("actorder") == "group":
        raise UnsupportedFormat(
            "the checkpoint uses actorder 'group' (g_idx), which compressed-tensors itself removed."
        )
    stated = Fields(weights, "weights of quantization_config", UnsupportedFormat)
    symmetric = stated.flag("symmetric", default=False)
    group_size = stated.integer("group_size", 1, MAX_SIZE) if strategy == "group" else None
    if not group.get("input_activations"):
        return weight_only_scheme(bits, symmetric=symmetric, group_size=group_size)
    inputs = _input_facts(group)
    if (bits, symmetric, inputs) == (4, True, (8, "float", True, "token", True)) and group_size is not None:
        scheme = replace(SCHEMES["W4A8_FP8"], name=f"W4A8_FP8_G{group_size}", group_size=group_size)
        return known_scheme(scheme)
    raise UnsupportedFormat(
        f"the checkpoint quantizes the input activations of {PACK_FORMAT} weights of {bits} bits, group size "
        f"{group_size}, symmetric {symmetric}, with (bits, type, symmetric, strategy, dynamic) = {inputs}; "
        "float inputs of 8 bits, dynamic per token, are read beside 4 bits, symmetric in groups."
    )


def _read_byte_scales(group: Mapping[str, Any], form: str) -> Scheme:
    """Return the scheme of floats with scales of one byte, whose inputs are rounded alike or not at all."""
    known = [each for each in SCHEMES.values() if each.scale_type is not None and format_of(each) == form]
    stated = {part: group.get(part) or None for part in ("weights", "input_activations")}
    for scheme in known:
        wanted = {part: group_of(scheme, ())[part] for part in stated}
        if all(_facts(stated[part], like=wanted[part]) == wanted[part] for part in stated):
            return scheme
    like = group_of(known[0], ())["weights"]
    given = _facts(stated["weights"] or {}, like=like) or {}
    raise UnsupportedFormat(
        f"the checkpoint's weights are format {form} with {_listed(given)}, and input activations "
        f"{stated['input_activations']}; it is read with {_listed(like)} and inputs "
        + " or ".join("in 16 bits" if each.activation is None else "of the same form" for each in known)
        + "."
    )


def _facts(stated: Mapping[str, Any] | None, *, like: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of weights or inputs that decide how they are read; the dtype of scales may be left
    out. None where nothing is stated."""
    if stated is None or like is None:
        return None if stated is None else dict(stated)
    found = {key: stated.get(key) for key in like}
    if found["scale_dtype"] is None:
        found["scale_dtype"] = like["scale_dtype"]
    found |= {"block_structure": stated["block_structure"]} if stated.get("block_structure") else {}
    return found | ({"actorder": "group"} if stated.get("actorder") == "group" else {})


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _read_int8(group: Mapping[str, Any], form: str) -> Scheme:
    weights = group.get("weights") or {}
    facts = tuple(weights.get(key) for key in ("num_bits", "type", "symmetric"))
    strategy = weights.get("strategy")
    inputs = _input_facts(group)
    read = (
        form in (INT_FORMAT, NAIVE_FORMAT) and facts == (8, "int", True) and strategy in ("channel", "tensor")
    )
    names = {
        (8, "int", True, "token", True): "INT8_DYNAMIC",
        (8, "int", False, "token", True): "INT8_DYNAMIC_ASYM",
        (8, "int", True, "tensor", False): "INT8_STATIC",
        (8, "int", False, "tensor", False): "INT8_STATIC_ASYM",
    }
    hashable = all(isinstance(each, str | int | None) for each in inputs)
    if not read or not hashable or inputs not in names:
        raise UnsupportedFormat(
            f"the checkpoint's weights are format {form}, (bits, type, symmetric) = {facts}, strategy "
            f"{strategy}, with input activations "
            f"(bits, type, symmetric, strategy, dynamic) = {inputs}; {PACK_FORMAT} of 2, 3, 4 or 8 bits, per "
            "group or channel, is read, and "
            f"{INT_FORMAT} of 8 bits, symmetric, per channel or tensor, with inputs of 8 bits, dynamic per "
            "token or static per tensor."
        )
    return SCHEMES[names[inputs]]


def _input_facts(group: Mapping[str, Any]) -> tuple[Any, ...]:
    inputs = group.get("input_activations") or {}
    return tuple(inputs.get(key) for key in ("num_bits", "type", "symmetric", "strategy", "dynamic"))


def _read_float(group: Mapping[str, Any], form: str) -> Scheme:
    weights = group["weights"]
    inputs = _input_facts(group)
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    symmetric = weights.get("symmetric")
    names = {
        (8, "float", True, "token", True): "FP8_DYNAMIC",
        (8, "float", True, "tensor", False): "FP8_STATIC",
        (8, "float", True, "group", True): "FP8_BLOCK",
    }
    block = weights.get("block_structure")
    group_size = (group.get("input_activations") or {}).get("group_size")
    hashable = all(isinstance(each, str | int | None) for each in inputs)
    known = (
        form in (FLOAT_FORMAT, NAIVE_FORMAT)
        and bits == 8
        and symmetric is True
        and hashable
        and inputs in names
    )
    if known and names[inputs] == "FP8_BLOCK":
        known = strategy == "block" and block in ([128, 128], "128x128") and group_size == 128
    elif known:
        known = strategy in ("channel", "tensor")
    if not known:
        raise UnsupportedFormat(
            f"the checkpoint's weights are format {form}, type float, {bits} bits, strategy {strategy}, "
            f"block_structure {block}, with "
            f"input activations (bits, type, symmetric, strategy, dynamic) = {inputs} in groups of "
            f"{group_size}; {FLOAT_FORMAT} of 8 bits, "
            "symmetric, is read: per channel or tensor with inputs of 8 bits, dynamic per token or static "
            "per tensor, or in blocks of "
            "128 x 128 with inputs dynamic per group of 128."
        )
    return SCHEMES[names[inputs]]
