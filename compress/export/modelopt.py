"""Unified checkpoints of NVIDIA Model Optimizer (`quant_method: modelopt`). TensorRT-LLM, vLLM and SGLang
read some algorithms each.

    quant_algo                  scheme          tensors of <module>
    FP8                         FP8_STATIC      weight e4m3 [O, I], weight_scale and input_scale float32 []
    FP8_PER_CHANNEL_PER_TOKEN   FP8_DYNAMIC     weight e4m3 [O, I], weight_scale float32 [O]
    W8A16                       W8A16           weight int8 [O, I], weight_scale float32 [O]
    W4A16_AWQ                   W4A16_G128      weight uint8 [ceil(O/2), I], the lower row in the low half
                                (or G64)        of a byte; weight_scale float32 [O, G]
    W4A16_NVFP4                 NVFP4           weight uint8 [O, I/2], weight_scale e4m3 [O, I/16],
                                                weight_scale_2 float32 [] (`modelopt_nvfp4.py`)
    NVFP4                       NVFP4_W4A4      the same, and input_scale float32 []

value = code * weight_scale * weight_scale_2; integer codes are signed, without zero points. FP8 has one scale
for a whole matrix. Programs multiply q, k and v, or gate and up, as one and round those anew whose scales
differ, so the rounder gives them one scale (`round: {kind: rtn, scale: matrix}`).

What is quantized is stated twice: in `hf_quant_config.json` (`quantization`: quant_algo, group_size,
exclude_modules, kv_cache_quant_algo) and in the `quantization_config` of `config.json` (quant_algo,
config_groups, ignore, kv_cache_scheme). Dense modules are shell patterns. Scales of an FP8 KV cache are
`<attention>.k_proj.k_scale` and `.v_proj.v_scale`. Not read: several algorithms in one model, blocks
(FP8_PB_WO, whose inputs programs round in different ways), the algorithms of other schemes, and linears with
a `pre_quant_scale`, by which their inputs are multiplied.

Checked against the export of modelopt 0.47 and the sources of vLLM 0.32, TensorRT-LLM and SGLang.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule, StaticKV
from compress.export.compressed_tensors import decode_unpacked
from compress.export.modelopt_algorithms import (
    ALGORITHMS,
    AWQ_GROUPS,
    FP8,
    INT4,
    NVFP4,
    NVFP4_WEIGHTS,
    algorithm_of,
    consumers_of,
    why_no_algorithm,
)
from compress.export.modelopt_nvfp4 import decode_nvfp4, encode_nvfp4, nvfp4_leaves
from compress.export.rules import exact_scales, layout_rules, quantized_shapes, whole_group_rules
from compress.models.arch import Arch
from compress.models.config_file import QUANT_CONFIG_NAME
from compress.models.linear_groups import LINEAR_GROUPS
from compress.quant.codec import ForeignCodec, check_leaf, check_matrix
from compress.quant.kv import FP8_STATIC
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import QuantizedWeight, Scheme, weight_only_scheme
from compress.untrusted.fields import Fields

PRODUCER = {"name": "compress"}
KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


class ModelOptCodec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk."""

    aliases: Mapping[str, str] = MappingProxyType({})

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        algorithm = algorithm_of(scheme)
        if algorithm in (NVFP4, NVFP4_WEIGHTS):
            return nvfp4_leaves(scheme)
        return frozenset({"weight", "weight_scale"} | ({"input_scale"} if algorithm == FP8 else set()))

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return the tensors of a weight.

        Raises:
            UnsupportedFormat: its scheme has no algorithm, or its scales cannot be stored as they are.
        """
        algorithm = algorithm_of(weight.scheme)
        if algorithm is None:
            raise UnsupportedFormat(f"modelopt has no quant_algo for {weight.scheme.name}.")
        if algorithm in (NVFP4, NVFP4_WEIGHTS):
            return encode_nvfp4(weight)
        scale_OG = exact_scales(weight.scale_OG, torch.float32)
        if algorithm == INT4:
            return {"weight": _pack_rows(weight.codes_OI), "weight_scale": scale_OG}
        leaves = {"weight": weight.codes_OI, "weight_scale": scale_OG[:, 0].contiguous()}
        if algorithm == FP8:
            if not weight.has_one_scale:
                raise UnsupportedFormat("[one-scale] the rows of a linear have several scales.")
            assert weight.input_scale is not None
            leaves |= {"weight_scale": scale_OG[0, 0].clone(), "input_scale": weight.input_scale.reshape(())}
        return leaves

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        algorithm = algorithm_of(scheme)
        if algorithm in (NVFP4, NVFP4_WEIGHTS):
            return decode_nvfp4(leaves, scheme)
        if algorithm != INT4:
            return decode_unpacked(
                leaves["weight"], leaves["weight_scale"], leaves.get("input_scale"), scheme
            )
        num_bytes, in_features = check_matrix(leaves, "weight")
        out_features, num_groups = check_matrix(leaves, "weight_scale")
        if (out_features + 1) // 2 != num_bytes:
            raise UnsupportedFormat(
                f"its weight has {num_bytes} rows of bytes, and its scales {out_features} rows; a byte holds "
                "two rows."
            )
        check_leaf(leaves, "weight", torch.uint8, (num_bytes, in_features))
        check_leaf(leaves, "weight_scale", None, (out_features, num_groups))
        if in_features != num_groups * (scheme.group_size or 1):
            raise UnsupportedFormat(
                f"its K is {in_features} with {num_groups} scales, where groups are {scheme.group_size}."
            )
        codes_OI = _unpack_rows(leaves["weight"], out_features)
        return QuantizedWeight(scheme, codes_OI, leaves["weight_scale"].to(torch.float32).contiguous())

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        own = stated.fields("quantization") if stated.has("quantization") else stated
        name = own.text("quant_algo") if own.has("quant_algo") else "null"
        if name.upper() not in ALGORITHMS:
            raise UnsupportedFormat(
                f"the checkpoint has the modelopt quant_algo {name:.80}; {', '.join(ALGORITHMS)} are read, "
                "each alone."
            )
        if own.has("has_zero_point") and own.flag("has_zero_point"):
            raise UnsupportedFormat("the checkpoint's weights have zero points (has_zero_point).")
        scheme = ALGORITHMS[name.upper()]
        if name.upper() == NVFP4 and _rounds_no_inputs(own):
            scheme = ALGORITHMS[NVFP4_WEIGHTS]
        group_size = _group_size(own)
        if scheme.group_size is not None and group_size is not None and group_size != scheme.group_size:
            if name.upper() != INT4:
                raise UnsupportedFormat(
                    f"the checkpoint is {name} in groups of {group_size}; {scheme.group_size} are read."
                )
            scheme = weight_only_scheme(4, symmetric=True, group_size=group_size)
            if algorithm_of(scheme) is None:
                raise UnsupportedFormat(
                    f"the checkpoint is {name} in groups of {group_size}; "
                    f"{' and '.join(map(str, AWQ_GROUPS))} are read."
                )
        dense = own.texts("ignore", default=()) + own.texts("exclude_modules", default=())
        return {linear: scheme for linear in linears if not any(_names(each, linear) for each in dense)}

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        own = stated.fields("quantization") if stated.has("quantization") else stated
        algorithm = own.text("kv_cache_quant_algo") if own.has("kv_cache_quant_algo") else None
        given = quantization_config.get("kv_cache_scheme") if own is stated else None
        if algorithm in (None, "FP8") and given in (None, KV_FP8):
            return None if algorithm is None and given is None else FP8_STATIC
        raise UnsupportedFormat(
            f"the checkpoint has a KV cache of kv_cache_quant_algo {algorithm} and kv_cache_scheme {given}; "
            f"FP8 ({KV_FP8}) is read."
        )


def _group_size(own: Fields) -> int | None:
    """Return the group size that a config states, None where it states none.

    Raises:
        UnsupportedFormat: its config_groups are not one group.
    """
    if own.has("group_size"):
        return own.integer("group_size", 0, 1 << 24) or None
    if not own.has("config_groups"):
        return None
    groups = own.fields("config_groups")
    names = list(groups)
    if len(names) != 1:
        raise UnsupportedFormat(
            f"the checkpoint's quantization_config has {len(names)} config_groups; one is read."
        )
    (name,) = names
    group = groups.fields(name)
    weights = group.fields("weights") if group.has("weights") else None
    if weights is None:
        raise UnsupportedFormat("the checkpoint's config_groups state nothing of its weights.")
    return weights.integer("group_size", 1, 1 << 24) if weights.has("group_size") else None


def _rounds_no_inputs(own: Fields) -> bool:
    """Return whether a config has config_groups and none of them rounds inputs; where it states NVFP4, vLLM
    reads W4A16_NVFP4 then."""
    groups = own.fields("config_groups", default={})
    stated = [groups.fields(name).has("input_activations") for name in groups]
    return bool(stated) and not any(stated)


def _names(pattern: str, module: str) -> bool:
    """Return whether an entry of the list of dense modules names this one: the module, one around it, or a
    shell pattern."""
    return module == pattern or module.startswith(f"{pattern}.") or fnmatchcase(module, pattern)


def _pack_rows(codes_OI: Tensor) -> Tensor:
    """Pack signed codes of four bits, two rows to one of bytes; a last row alone goes with zeros."""
    wide_OI = torch.nn.functional.pad(codes_OI.to(torch.int16), (0, 0, 0, len(codes_OI) % 2)) & 15
    return (wide_OI[0::2] | (wide_OI[1::2] << 4)).to(torch.uint8).contiguous()


def _unpack_rows(bytes_PI: Tensor, out_features: int) -> Tensor:
    """Return the codes, int8 [O, I], that `_pack_rows` packed."""
    halves_PI2 = torch.stack([bytes_PI & 15, bytes_PI >> 4], dim=1).to(torch.int8)
    codes_OI = halves_PI2.flatten(0, 1)[:out_features]
    return torch.where(codes_OI > 7, codes_OI - 16, codes_OI)


class ModelOpt:
    """The format `modelopt`."""

    quant_method = "modelopt"
    scale_dtype = torch.float32
    codec: ForeignCodec = ModelOptCodec()
    static_kv: StaticKV | None = StaticKV(beside={"kv_cache_scheme": KV_FP8}, alone=None)

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        layers = scheme.layers
        common = {"dynamic": False, "num_bits": layers.num_bits, "type": layers.type}
        weights = common if layers.group_size is None else {**common, "group_size": layers.group_size}
        group: dict[str, Any] = {"weights": weights, "targets": ["Linear"]}
        if layers.activation is not None:
            inputs = {"dynamic": layers.activation != "tensor", "num_bits": 8, "type": "float"}
            group["input_activations"] = weights if layers.has_input_global_scale else inputs
        return {
            "quant_method": self.quant_method,
            "quant_algo": algorithm_of(layers),
            "config_groups": {"group_0": group},
            "ignore": [
                *sorted({*scheme.dense} if scheme.head is not None else {*scheme.dense, head}),
                *(f"{part}*" for part in untouched),
            ],
            "producer": PRODUCER,
        }

    def write_files(self, directory: Path, quantization_config: Mapping[str, Any]) -> None:
        """Write `hf_quant_config.json`, which states a `quantization_config` once more."""
        weights = quantization_config["config_groups"]["group_0"]["weights"]
        algorithm = quantization_config["quant_algo"]
        quantization = {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in quantization_config else None,
            "exclude_modules": quantization_config["ignore"],
            **({"group_size": weights["group_size"]} if "group_size" in weights else {}),
            **({"has_zero_point": False, "pre_quant_scale": False} if algorithm == INT4 else {}),
        }
        text = json.dumps({"producer": PRODUCER, "quantization": quantization}, indent=2, sort_keys=True)
        (directory / QUANT_CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    def takes_one_scale(self, scheme: Scheme) -> bool:
        """Return whether all weights of a linear of this scheme must have one scale."""
        return algorithm_of(scheme) == FP8

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        rules = []
        if len(scheme.all) > 1:
            names = ", ".join(each.name for each in scheme.all)
            rules.append(Rule("one-scheme", f"linears have several schemes ({names}); one is written."))
        for each in scheme.all:
            if algorithm_of(each) is None:
                rules.append(why_no_algorithm(each))
        if arch.has_experts:
            rules.append(
                Rule(
                    "experts",
                    "the scales of experts are not written: programs multiply gate and up of an expert as "
                    "one and expect one scale for both.",
                )
            )
        rules += _split_groups(arch, scheme)
        for name, (out_features, _) in quantized_shapes(arch, scheme):
            if scheme.layers.num_bits == 4 and scheme.layers.type == "int" and out_features % 2:
                rules.append(Rule("whole-bytes", f"{name} has N = {out_features}; two rows fill a byte."))
        return [*rules, *layout_rules(arch, scheme, self.quant_method), *whole_group_rules(arch, scheme)]

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        return consumers_of(arch, scheme)


def _split_groups(arch: Arch, scheme: ModelScheme) -> list[Rule]:
    """Return a broken rule where some of q, k and v, or one of gate and up, is dense: programs look up the
    linears of a group as one."""
    rules: dict[str, Rule] = {}
    for idx, layer in enumerate(arch.layers):
        has_own = "attn.q_down" in layer.linears or layer.recurrence is not None
        for group in (*LINEAR_GROUPS.values(), *layer.attention_groups[:has_own]):
            names = [each for each in group.linears if each in layer.linears]
            schemes = {scheme.for_linear(f"layers.{idx}.{each}") for each in names}
            if len(schemes) > 1:
                problem = f"of {', '.join(names)} some are dense; programs multiply them as one."
                rules.setdefault(group.name, Rule("whole-linear-groups", problem))
    return list(rules.values())


FORMATS.add("modelopt", ModelOpt())
