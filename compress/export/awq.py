"""AWQ checkpoints in AutoAWQ's GEMM layout: vLLM loads them as they are.

    <module>.qweight  int32 [I, ceil(O/8)]   codes + 8, packed along O
    <module>.qzeros   int32 [G, ceil(O/8)]   zero_point + 8, packed along O
    <module>.scales   float16 [G, O]         value = (code - zero_point) * scale

Of the eight columns of a word, nibble j (low bits first) holds column `COLUMNS[j]`, the order in which
the format's kernel unpacks pairs. The format always has zero points; a symmetric scheme stores 8
everywhere, and `sym` in `quantization_config`, a key of ours that consumers ignore, restores it as
symmetric when it is read. Scales are float16 whatever the model's dtype; the head stays dense. Checked
against vLLM 0.32; `transformers` needs the package gptqmodel.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule
from compress.export.rules import float16_scales, in_layers, packed_rules, whole_words
from compress.export.vllm import vllm_builds
from compress.models.arch import Arch
from compress.models.limits import MAX_SIZE
from compress.quant.codec import ForeignCodec, check_leaf, check_matrix
from compress.quant.model_scheme import ModelScheme
from compress.quant.packing import pack, unpack
from compress.quant.scheme import QuantizedWeight, Scheme, weight_only_scheme
from compress.untrusted.fields import Fields

BITS = 4
COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqCodec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk; the scales come back in
    float16."""

    aliases: Mapping[str, str] = MappingProxyType({})

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        return frozenset({"qweight", "qzeros", "scales"})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        zero_OG = weight.zero_point_OG
        zero_GO = torch.zeros_like(weight.scale_OG, dtype=torch.int8).t() if zero_OG is None else zero_OG.t()
        return {
            "qweight": _pack_columns(weight.codes_OI.t()),
            "qzeros": _pack_columns(zero_GO),
            "scales": float16_scales(weight.scale_OG),
        }

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        scale_GO = leaves["scales"]
        num_groups, out_features = check_matrix(leaves, "scales")
        in_features, _ = check_matrix(leaves, "qweight")
        if num_groups != scheme.num_groups(in_features):
            raise UnsupportedFormat(
                f"it has {num_groups} groups of scales where {scheme.name} has "
                f"{scheme.num_groups(in_features)}."
            )
        num_words = -(-out_features // len(COLUMNS))
        check_leaf(leaves, "scales", None, (num_groups, out_features))
        check_leaf(leaves, "qweight", torch.int32, (in_features, num_words))
        check_leaf(leaves, "qzeros", torch.int32, (num_groups, num_words))
        codes_IO, zero_GO = (_unpack_columns(leaves[name], out_features) for name in ("qweight", "qzeros"))
        if scheme.symmetric and bool((zero_GO != 0).any()):
            raise UnsupportedFormat(
                "the checkpoint's config says that its codes are symmetric and its zero points are not all 8."
            )
        zero_OG = None if scheme.symmetric else zero_GO.t().contiguous()
        return QuantizedWeight(scheme, codes_IO.t().contiguous(), scale_GO.t().contiguous(), zero_OG)

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        bits = quantization_config.get("bits", quantization_config.get("w_bit"))
        group_size = quantization_config.get("group_size", quantization_config.get("q_group_size"))
        version = str(quantization_config.get("version") or "gemm").lower()
        backend = quantization_config.get("backend") or "autoawq"
        if (
            type(bits) is not int
            or bits != BITS
            or version != "gemm"
            or backend != "autoawq"
            or type(group_size) is not int
            or not (1 <= group_size <= MAX_SIZE or group_size == -1)
        ):
            raise UnsupportedFormat(
                f"the checkpoint is AWQ of {bits} bits in groups of {group_size}, version {version} of "
                f"{backend}; 4 bits in AutoAWQ's "
                "version gemm are read."
            )
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        if stated.flag("lm_head", default=False):
            raise UnsupportedFormat(
                "the checkpoint has an AWQ head (lm_head); linears of the layers are read."
            )
        symmetric = stated.flag("sym", default=False) or not stated.flag("zero_point", default=True)
        scheme = weight_only_scheme(
            BITS, symmetric=symmetric, group_size=None if group_size == -1 else group_size
        )
        # parts of names, as AutoAWQ and vLLM take them
        dense = stated.texts("modules_to_not_convert", default=())
        return {linear: scheme for linear in in_layers(linears) if not any(part in linear for part in dense)}

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        return None


def _pack_columns(codes_RO: Tensor) -> Tensor:
    """Pack int8 [R, O] into int32 [R, ceil(O/8)]; a last word that is not full ends in zero bits."""
    rows, columns = codes_RO.shape
    padded = torch.nn.functional.pad(codes_RO, (0, whole_words(columns, BITS) - columns), value=-8)
    return pack(padded.reshape(rows, -1, len(COLUMNS))[..., COLUMNS].reshape(rows, -1), BITS)


def _unpack_columns(words: Tensor, columns: int) -> Tensor:
    """Unpack int32 [R, W] to int8 [R, O]."""
    rows, num_words = words.shape
    nibbles = unpack(words, BITS, num_words * len(COLUMNS)).view(rows, num_words, len(COLUMNS))
    codes = torch.empty_like(nibbles)
    codes[..., COLUMNS] = nibbles
    return codes.view(rows, -1)[:, :columns]


class Awq:
    quant_method = "awq"
    scale_dtype = torch.float16
    static_kv = None
    codec: ForeignCodec = AwqCodec()

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {
            "quant_method": self.quant_method,
            "bits": scheme.layers.num_bits,
            "group_size": scheme.layers.group_size or -1,
            "zero_point": True,
            "sym": scheme.layers.symmetric,
            "version": "gemm",
            "modules_to_not_convert": [*sorted({*scheme.dense, head}), *untouched],
        }

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        rules = packed_rules(arch, scheme, self.quant_method, bits=(BITS,))
        if scheme.head is not None:
            rules.append(Rule("dense-head", "an AWQ checkpoint has a dense head."))
        return rules

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        return [
            Consumer("compress runtime", loads=True, note="any scheme that is exported"),
            Consumer("transformers", loads=False, note="not without the package gptqmodel"),
            *vllm_builds(arch, scheme, "reads awq natively"),
        ]


FORMATS.add("awq", Awq())
