"""GPTQ checkpoints (AutoGPTQ, format version 1): vLLM loads them as they are.

    <module>.qweight  int32 [ceil(I*b/32), O]   codes + 2^(b-1), packed along I, low bits first
    <module>.qzeros   int32 [G, ceil(O*b/32)]   zero_point + 2^(b-1) - 1, packed along O: stored minus one
    <module>.scales   float16 [G, O]            value = (code - zero_point) * scale
    <module>.g_idx    int32 [I]                 group of each input: i // group_size, or any order

`quantization_config` states one number of bits, one group size (-1: one group) and `sym` for all linears
of the layers, and in `lm_head` whether the head is one of them. Codes of three bits lie without gaps, 32
in three words. Linears that stay dense are patterns
after `-:` in `dynamic`. Scales are float16 whatever the model's dtype. Checked against vLLM 0.32,
which takes 4 and 8 bits, and the code of GPTQModel 7.7, which takes all; `transformers` needs that package.

A zero point of 0 (stored: -1) is read in two ways by programs of this format, so it is refused here in
both directions.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule
from compress.export.config_groups import matches_module
from compress.export.rules import float16_scales, in_layers, packed_rules, start_of
from compress.export.vllm import vllm_builds
from compress.export.vllm_gptq import why_vllm_refuses_gptq
from compress.models.arch import Arch
from compress.models.family import family_of_arch
from compress.models.limits import MAX_SIZE
from compress.quant.codec import ForeignCodec, check_leaf, check_matrix
from compress.quant.model_scheme import ModelScheme
from compress.quant.packing import num_words, pack, unpack
from compress.quant.scheme import QuantizedWeight, Scheme, weight_only_scheme
from compress.untrusted.fields import Fields

BITS = (2, 3, 4, 8)
VLLM_BITS = (4, 8)
SKIP = "-:"
"""Prefix of a pattern in `dynamic` that names dense linears."""
FUSED = re.compile(r"\b([qkv]|gate|up)_proj$")
"""Linears that vLLM fuses and looks up in `dynamic` by the name of the whole."""
_AMBIGUOUS = "a zero point of 0, which GPTQ checkpoints store as -1 and programs read as 0 or as {above}"


class GptqCodec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk; the scales come back in
    float16."""

    aliases: Mapping[str, str] = MappingProxyType({})

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        return frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        scheme = weight.scheme
        zero_OG = weight.zero_point_OG
        zero_GO = (
            torch.zeros_like(weight.scale_OG, dtype=torch.int16).t()
            if zero_OG is None
            else zero_OG.t().to(torch.int16)
        )
        if bool((zero_GO == scheme.min_code).any()):
            raise UnsupportedFormat(f"a linear has {_AMBIGUOUS.format(above=1 << scheme.num_bits)}.")
        return {
            "qweight": pack(weight.codes_OI, scheme.num_bits).t().contiguous(),
            "qzeros": pack(zero_GO - 1, scheme.num_bits),
            "scales": float16_scales(weight.scale_OG),
            "g_idx": _in_order(weight.shape[1], scheme),
        }

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        scale_GO = leaves["scales"]
        g_idx = leaves["g_idx"]
        if g_idx.dim() != 1 or g_idx.dtype.is_floating_point or not len(g_idx):
            raise UnsupportedFormat("its g_idx is not one whole number for each input.")
        in_features = g_idx.shape[0]
        out_features = check_matrix(leaves, "scales")[1]
        bits = scheme.num_bits
        if not torch.equal(g_idx.to(torch.int32), _in_order(in_features, scheme)):
            raise UnsupportedFormat(
                "its g_idx is not i // group_size: the weight is in activation order (desc_act), whose "
                "groups are scattered over the "
                "input. A checkpoint made with desc_act off, or with static_groups in the order of the "
                "input, is read."
            )
        if scale_GO.shape[0] != scheme.num_groups(in_features):
            raise UnsupportedFormat(
                f"it has {scale_GO.shape[0]} groups of scales where {scheme.name} has "
                f"{scheme.num_groups(in_features)}."
            )
        check_leaf(leaves, "scales", None, scale_GO.shape)
        check_leaf(leaves, "qweight", torch.int32, (num_words(in_features, bits), out_features))
        check_leaf(leaves, "qzeros", torch.int32, (len(scale_GO), num_words(out_features, bits)))
        codes_OI = unpack(leaves["qweight"].t().contiguous(), bits, in_features).contiguous()
        stored_GO = unpack(leaves["qzeros"], bits, out_features)
        zero_OG = _zero_points(stored_GO, scheme)
        return QuantizedWeight(scheme, codes_OI, scale_GO.t().contiguous(), zero_OG)

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        bits = quantization_config.get("bits")
        group_size = quantization_config.get("group_size")
        form = quantization_config.get("checkpoint_format") or "gptq"
        if (
            form != "gptq"
            or quantization_config.get("is_marlin_format")
            or quantization_config.get("pack_dtype") not in (None, "int32")
        ):
            raise UnsupportedFormat(
                f"the checkpoint is GPTQ in checkpoint_format {form}, packed in "
                f"{quantization_config.get('pack_dtype') or 'int32'}; "
                "checkpoint_format gptq (version 1: zeros stored minus one, int32 words) is read."
            )
        if (
            type(bits) is not int
            or bits not in BITS
            or type(group_size) is not int
            or not (1 <= group_size <= MAX_SIZE or group_size == -1)
        ):
            raise UnsupportedFormat(
                f"the checkpoint is GPTQ of {bits} bits in groups of {group_size}; 2, 3, 4 and 8 "
                "bits are read."
            )
        if quantization_config.get("modules_in_block_to_quantize"):
            raise UnsupportedFormat(
                "the checkpoint's modules_in_block_to_quantize names the quantized linears, which is not "
                "read."
            )
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        skipped = _skipped(stated.mapping("dynamic", default={}))
        scheme = weight_only_scheme(
            bits,
            symmetric=stated.flag("sym", default=True),
            group_size=None if group_size == -1 else group_size,
        )
        quantized = linears if stated.flag("lm_head", default=False) else in_layers(linears)
        return {
            linear: scheme
            for linear in quantized
            if not any(matches_module(pattern, linear) for pattern in skipped)
        }

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        return None


def _fused(linear: re.Match[str]) -> str:
    return "gate_up_proj" if linear[1] in ("gate", "up") else "qkv_proj"


def _in_order(in_features: int, scheme: Scheme) -> Tensor:
    """Return the g_idx of groups that follow each other."""
    return torch.arange(in_features, dtype=torch.int32) // (scheme.group_size or in_features)


def _zero_points(stored_GO: Tensor, scheme: Scheme) -> Tensor | None:
    """Return int8 [O, G] of zero points stored minus one; None for a symmetric scheme, whose stored zeros
    must agree."""
    if scheme.symmetric:
        if bool((stored_GO != -1).any()):
            raise UnsupportedFormat(
                "the checkpoint's config says that its codes are symmetric and its zero points are not all "
                f"{1 << (scheme.num_bits - 1)}."
            )
        return None
    if bool((stored_GO == scheme.max_code).any()):
        raise UnsupportedFormat(f"it has {_AMBIGUOUS.format(above=1 << scheme.num_bits)}.")
    return (stored_GO + 1).t().contiguous()


def _skipped(dynamic: Mapping[str, Any]) -> list[str]:
    if other := [pattern for pattern in dynamic if not pattern.startswith(SKIP)]:
        raise UnsupportedFormat(
            f"the checkpoint's dynamic gives '{other[0]}' a scheme of its own; patterns behind '{SKIP}' are "
            "read."
        )
    return [pattern.removeprefix(SKIP) for pattern in dynamic]


class Gptq:
    quant_method = "gptq"
    scale_dtype = torch.float16
    static_kv = None
    codec: ForeignCodec = GptqCodec()

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        dense = sorted({*scheme.dense, *(FUSED.sub(_fused, linear) for linear in scheme.dense)})
        patterns = [rf"^{re.escape(name)}$" for name in dense]
        patterns += [rf"{start_of(part)}(\.|$)" for part in untouched]
        dynamic: dict[str, Any] = {"dynamic": {SKIP + each: {} for each in patterns}} if patterns else {}
        return {
            "quant_method": self.quant_method,
            "bits": scheme.layers.num_bits,
            "group_size": scheme.layers.group_size or -1,
            "desc_act": False,
            "sym": scheme.layers.symmetric,
            "checkpoint_format": "gptq",
            "lm_head": scheme.head is not None,
            **dynamic,
        }

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        rules = packed_rules(arch, scheme, self.quant_method, bits=BITS)
        if not scheme.layers.symmetric:
            rules.append(
                Rule(
                    "symmetric",
                    "vLLM reads symmetric GPTQ codes only, and zeros stored minus one are ambiguous.",
                )
            )
        if scheme.dense and family_of_arch(arch).untouched:
            rules.append(
                Rule(
                    "dense-linears",
                    f"consumers name the linears of this {arch.family} model in several ways, and gptq lists "
                    "dense ones by pattern; compressed-tensors has them by name.",
                )
            )
        if scheme.head not in (None, scheme.layers):
            rules.append(Rule("one-scheme", "a quantized head has the scheme of the layers or stays dense."))
        return rules

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        bits = scheme.layers.num_bits
        read = bits in VLLM_BITS
        note = "reads gptq natively" if read else f"it reads gptq of 4 and 8 bits, not of {bits}"
        refused = why_vllm_refuses_gptq(arch)
        return [
            Consumer("compress runtime", loads=True, note="any scheme that is exported"),
            Consumer("transformers", loads=False, note="not without the package gptqmodel"),
            *vllm_builds(arch, scheme, refused or note, loads=read and refused is None),
        ]


FORMATS.add("gptq", Gptq())
