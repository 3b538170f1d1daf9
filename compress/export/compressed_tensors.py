"""compressed-tensors `pack-quantized`: the default format; `transformers` and vLLM load it as it is.

    <module>.weight_packed      int32 [O, ceil(I * b / 32)]   codes + 2^(b-1), packed along I
    <module>.weight_scale       [O, G] in the model's dtype   (channel: [O, 1])
    <module>.weight_shape       int64 [2] = [O, I]
    <module>.weight_zero_point  int32 [ceil(O * b / 32), G]   asymmetric only, packed along O

value = (code - zero_point) * scale. `config.json` says it all in `quantization_config`; linears that stay dense are listed in `ignore` by
exact name. Checked against compressed-tensors 0.20, transformers 5.23 and vLLM 0.32. Activations are not quantized by any scheme here.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule
from compress.models.arch import Arch
from compress.quant.codec import ForeignCodec
from compress.quant.packing import pack, unpack
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme

FORMAT_VERSION = "0.20.0"
PACK_FORMAT = "pack-quantized"


class PackQuantizedCodec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk."""

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        names = {"weight_packed", "weight_scale", "weight_shape"}
        return frozenset(names if scheme.symmetric else names | {"weight_zero_point"})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        bits = weight.scheme.num_bits
        leaves = {
            "weight_packed": pack(weight.codes_OI, bits),
            "weight_scale": weight.scale_OG,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if weight.zero_point_OG is not None:
            leaves["weight_zero_point"] = pack(weight.zero_point_OG.t().contiguous(), bits).t().contiguous()
        return leaves

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        out_features, in_features = leaves["weight_shape"].tolist()
        codes_OI = unpack(leaves["weight_packed"], scheme.num_bits, in_features)
        zero_point_OG = None
        if not scheme.symmetric:
            packed_GO = leaves["weight_zero_point"].t().contiguous()
            zero_point_OG = unpack(packed_GO, scheme.num_bits, out_features).t().contiguous()
        return QuantizedWeight(scheme, codes_OI, leaves["weight_scale"], zero_point_OG)

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        groups = quantization_config.get("config_groups") or {}
        if len(groups) != 1:
            raise UnsupportedFormat(f"the checkpoint has {len(groups)} config_groups; one group over all linears is read.")
        if quantization_config.get("sparsity_config"):
            raise UnsupportedFormat("the checkpoint has a sparsity_config; sparse checkpoints are not read.")
        if quantization_config.get("kv_cache_scheme"):
            raise UnsupportedFormat("the checkpoint has a kv_cache_scheme; quantized KV caches are not read yet.")
        group = next(iter(groups.values()))
        if group.get("targets") != ["Linear"]:
            raise UnsupportedFormat(f"the checkpoint's config_groups target {group.get('targets')}; only ['Linear'] is read.")
        scheme = _read_scheme(group, str(group.get("format") or quantization_config.get("format")))
        ignored = list(quantization_config.get("ignore") or ())
        return {linear: scheme for linear in linears if not any(_names(pattern, linear) for pattern in ignored)}


def _names(pattern: str, module: str) -> bool:
    """An exact module name, or a regular expression behind `re:`, as the format defines `ignore`."""
    return re.match(pattern.removeprefix("re:"), module) is not None if pattern.startswith("re:") else pattern == module


def _read_scheme(group: Mapping[str, Any], form: str) -> Scheme:
    weights = group.get("weights") or {}
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if form != PACK_FORMAT or kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        raise UnsupportedFormat(
            f"the checkpoint's weights are format {form}, type {kind}, {bits} bits, strategy {strategy}; "
            f"{PACK_FORMAT} with int, 4 or 8 bits, per group or channel is read."
        )
    if group.get("input_activations") or group.get("output_activations"):
        raise UnsupportedFormat("the checkpoint quantizes activations; weight-only checkpoints are read.")
    if weights.get("actorder") == "group":
        raise UnsupportedFormat("the checkpoint uses actorder 'group' (g_idx), which compressed-tensors itself removed.")
    symmetric, group_size = bool(weights.get("symmetric")), weights.get("group_size") if strategy == "group" else None
    for known in SCHEMES.values():
        if (known.num_bits, known.symmetric, known.group_size) == (bits, symmetric, group_size):
            return known
    name = f"W{bits}A16" + (f"_G{group_size}" if group_size else "") + ("" if symmetric else "_ASYM")
    return Scheme(name, bits, symmetric, group_size)


class CompressedTensors:
    quant_method = "compressed-tensors"
    codec: ForeignCodec = PackQuantizedCodec()

    def quantization_config(self, scheme: Scheme, *, ignore: Iterable[str]) -> dict[str, Any]:
        weights = {
            "num_bits": scheme.num_bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": scheme.strategy,
            "group_size": scheme.group_size,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": PACK_FORMAT}
        return {
            "quant_method": self.quant_method,
            "format": PACK_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(ignore),
            "kv_cache_scheme": None,
            "version": FORMAT_VERSION,
        }

    def broken_rules(self, arch: Arch, scheme: Scheme) -> list[Rule]:
        rules = []
        if scheme.num_bits not in (4, 8):
            rules.append(Rule("bits", f"{scheme.num_bits} bits changed packing between versions; 4 and 8 are stable."))
        if len({(each.num_heads, each.num_kv_heads, each.head_dim, each.intermediate_size) for each in arch.layers}) > 1:
            rules.append(Rule("uniform-layers", "layers differ in width, which a stock config.json cannot say."))
        if scheme.group_size is not None:
            for name, size in sorted(_in_features(arch).items()):
                if size % scheme.group_size:
                    rules.append(
                        Rule("whole-groups", f"{name} has K = {size}, not a multiple of {scheme.group_size}; vLLM would floor it.")
                    )
        return rules

    def consumers(self, arch: Arch, scheme: Scheme) -> list[Consumer]:
        narrow = [name for name, size in sorted(_in_features(arch).items()) if size % 32]
        vllm = f"needs K % 32 = 0; {', '.join(narrow)} is not" if narrow else "reads pack-quantized natively"
        transformers = "decompresses at load: no speed, no memory saved"
        if not scheme.symmetric:
            transformers = "5.17 loads it; 5.23 only with CompressedTensorsConfig(dequantize=True)"
        return [
            Consumer("compress runtime", loads=True, note="any scheme that is exported"),
            Consumer("transformers", loads=True, note=transformers),
            Consumer("vLLM", loads=not narrow, note=vllm),
        ]


def _in_features(arch: Arch) -> dict[str, int]:
    return {name: layer.linear_shape(name, arch.hidden_size)[1] for layer in arch.layers for name in layer.linears}


FORMATS.add("compressed-tensors", CompressedTensors())
